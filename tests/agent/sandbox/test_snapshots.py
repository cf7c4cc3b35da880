"""Sandboxes started from one snapshot folder: isolation, the unchanged folder, and the diff of each sandbox."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from slime.agent.sandbox import SandboxError, SandboxLimits, Snapshot, make_sandbox
from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.agent.sandbox.local import LocalSandbox, choose_via, unavailable_reason
from slime.errors import UserError
from tests.agent.sandbox.boxes import ALL, box, inside

TASK = {
    "README.md": "# Task\n\nfix it\n",
    "src/main.py": "def add(a, b):\n    return a - b\n",
    "src/other.py": "x = 1\n",
    "old/one.txt": "1\n",
    "old/two.txt": "2\n",
    "again/kept.txt": "kept\n",
    "again/lost.txt": "lost\n",
    "becomes": "a file\n",
    "folder/inner.txt": "inner\n",
    "no newline": "end",
}
WORK = """
sed -i 's/a - b/a + b/' src/main.py
chmod +x src/other.py
rm -r old
rm -r again; mkdir again; echo kept > again/kept.txt; echo new > again/new.txt
rm becomes; mkdir becomes; echo deep > becomes/deep.txt
rm -r folder; echo flat > folder
printf 'end and more' > 'no newline'
head -c 100 /dev/urandom > noise; printf '\\0' >> noise
ln -s README.md link
mkdir empty
touch -d '2001-01-01' README.md
"""
CHANGED = [
    ("added", "again/new.txt"),
    ("deleted", "again/lost.txt"),
    ("deleted", "becomes"),
    ("added", "becomes/deep.txt"),
    ("added", "folder"),
    ("deleted", "folder/inner.txt"),
    ("added", "link"),
    ("modified", "no newline"),
    ("added", "noise"),
    ("deleted", "old/one.txt"),
    ("deleted", "old/two.txt"),
    ("modified", "src/main.py"),
    ("modified", "src/other.py"),
]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "task"
    for name, text in TASK.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("how", ["auto", "copy"])
@pytest.mark.parametrize("way", ALL)
def test_diff_lists_changes_and_leaves_the_snapshot_unchanged(way: str, how: str, task: Path) -> None:
    patches: list[str] = []
    noises: list[bytes] = []

    async def use(sandbox: MachineSandbox) -> None:
        assert (await sandbox.diff()).files == ()
        assert (await sandbox.exec("cat src/other.py")).out == "x = 1\n"
        assert await sandbox.exec(WORK) == (0, "", "")
        changes = await sandbox.diff()
        assert sorted(changes.files, key=lambda change: change[1]) == sorted(CHANGED, key=lambda change: change[1])
        assert "-    return a - b\n+    return a + b\n" in changes.patch
        assert "old mode 100644\nnew mode 100755\n" in changes.patch
        assert not changes.truncated
        patches.append(changes.patch)
        noises.append(await sandbox.read_bytes("noise"))

    inside(way, use, files=Snapshot(task, how=how))
    assert contents(task) == TASK
    for patch, noise in zip(patches, noises, strict=True):
        apply(patch, task)
        assert (task / "noise").read_bytes() == noise
        assert (task / "src/main.py").read_text() == "def add(a, b):\n    return a + b\n"
        assert (task / "no newline").read_text() == "end and more"
        assert (task / "becomes/deep.txt").read_text() == "deep\n"
        assert os.readlink(task / "link") == "README.md"
        assert not (task / "old").exists()


def apply(patch: str, folder: Path) -> None:
    words = ["git", "apply", "--verbose", "-"]
    done = subprocess.run(words, input=patch.encode(), cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


ODD = """
import os, sys
for name, (_, new) in eval(sys.stdin.read()).items():
    if os.path.lexists(name):
        os.unlink(name)
    if isinstance(new, str):
        os.symlink(new, name)
    elif new is not None:
        open(name, "wb").write(new)
"""
ODD_FILES: dict[bytes, tuple[bytes | None, bytes | str | None]] = {
    b"form feed": (b"a\n\x0cb\nc\n", b"a\n\x0cb\x0cx\nc\n"),
    b"separators": ("one\u2028two\u2029\x1c\x1d\x85three\n".encode(), "one\u2028TWO\u2029\x1c\x1d\x85three".encode()),
    b"returns": (b"a\r\nb\rc\r\n", b"a\r\nb\rC\r\nd\r"),
    b"latin": (b"caf\xe9\n", b"caf\xe9s\n"),
    b"bytes": (bytes(range(256)) * 9, bytes(reversed(range(256))) * 7),
    b"lost bytes": (b"\0gone", None),
    b"new bytes": (None, b"\0new"),
    b"emptied": (b"\0" * 9, b""),
    b"empty": (None, b""),
    b'na"me\\ with\ta\nbreak': (b"old\n", b"new\n"),
    b"no text \xff\xfe": (None, b"x\n"),
    "umlaut ü".encode(): (b"old\n", b"new\n"),
    b"becomes a link": (b"text\n", "elsewhere"),
}


@pytest.mark.parametrize("way", ["unshare", "subprocess"])
def test_git_applies_patches_with_unusual_contents_and_names(way: str, tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.mkdir()
    for name, (old, _) in ODD_FILES.items():
        if old is not None:
            (task / os.fsdecode(name)).write_bytes(old)

    async def use(sandbox: MachineSandbox) -> None:
        await sandbox.write_file("/tmp/odd.py" if sandbox.boundary else "odd.py", ODD)
        await sandbox.write_file("in", repr(ODD_FILES))
        line = f"{sandbox.python} -I {'/tmp/' if sandbox.boundary else ''}odd.py < in && rm -f in odd.py"
        assert await sandbox.exec(line) == (0, "", "")
        changes = await sandbox.diff()
        assert {os.fsencode(path) for _, path in changes.files} == set(ODD_FILES)
        assert not changes.truncated
        apply(changes.patch, task)
        for name, (_, new) in ODD_FILES.items():
            path = task / os.fsdecode(name)
            found = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.exists() else None
            assert found == new, name

    inside(way, use, files=Snapshot(task))


@pytest.mark.parametrize("way", ["unshare", "subprocess"])
def test_folders_deeper_than_the_path_limit_are_diffed_and_removed(way: str, tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.mkdir()
    (task / "led astray").symlink_to("..")
    (tmp_path / "file").write_text("outside\n")
    depth = 1100  # 6600 characters, and deeper than Python's recursion limit
    dig = f"""
import os
os.unlink("led astray"); os.mkdir("led astray"); open("led astray/file", "w").write("inside\\n")
for part in range({depth}):
    os.mkdir("inner"); os.chdir("inner")
open("deep", "w").write("here\\n")
os.mkdir("shut"); open("shut/file", "w").close(); os.chmod("shut", 0)
"""
    folders: list[str] = []

    async def use(sandbox: MachineSandbox) -> None:
        folders.append(sandbox.workdir)
        assert await sandbox.exec([sandbox.python, "-I", "-c", dig]) == (0, "", "")
        await sandbox.exec("mkfifo pipe; head -c 2000000 /dev/zero > large")
        changes = await sandbox.diff()
        deep = "inner/" * depth
        found = {path: kind for kind, path in changes.files if path != f"{deep}shut/file"}  # visible only to root
        assert found == {
            "led astray": "deleted", "led astray/file": "added", "pipe": "added", "large": "added", f"{deep}deep": "added"
        }  # fmt: skip
        assert changes.truncated  # patches hold neither pipes nor large files
        assert "outside" not in changes.patch
        assert "+inside\n" in changes.patch
        assert "+here\n" in changes.patch

    inside(way, use, files=Snapshot(task))
    assert way != "subprocess" or not [folder for folder in folders if os.path.exists(folder)]


@pytest.mark.parametrize("way", ALL)
def test_snapshot_files_belong_to_the_sandbox_user(way: str, task: Path) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        assert (await sandbox.exec("stat -c %u src/main.py src; id -u")).out.split() == [
            (await sandbox.exec("id -u")).out.strip()
        ] * 3
        assert (await sandbox.exec("git init -q . && git add -A && git status --short | wc -l")).out.strip() == str(
            len(TASK)
        )

    inside(way, use, files=Snapshot(task))


@pytest.mark.parametrize("way", ALL)
def test_sandboxes_of_one_snapshot_are_isolated(way: str, task: Path) -> None:
    async def use(one: MachineSandbox) -> None:
        async def other(two: MachineSandbox) -> None:
            await one.exec("echo one > src/other.py")
            assert await two.read_file("src/other.py") == "x = 1\n"
            assert (await one.diff()).files == (("modified", "src/other.py"),)
            assert (await two.diff()).files == ()

        await asyncio.to_thread(inside, way, other, files=Snapshot(task))

    inside(way, use, files=Snapshot(task))


def test_overlay_is_used_where_it_is_supported(task: Path) -> None:
    """Copying is a fallback: as root on a kernel with id-mapped mounts (5.19), the overlay must work."""

    async def run() -> bool:
        try:
            async with LocalSandbox(files=Snapshot(task, how="overlay")) as sandbox:
                return sandbox.box.overlay
        except SandboxError as error:
            return "did not start" not in str(error)

    if unavailable_reason("unshare") is not None:
        assert box("unshare") is None
        return
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert asyncio.run(run()) or os.geteuid() != 0 or release < (5, 19)


@pytest.mark.parametrize("how", ["auto", "copy"])
def test_snapshot_can_be_a_root_file_system(how: str, tmp_path: Path) -> None:
    """The root file system consists of this machine's shell, three tools and their libraries."""
    if unavailable_reason("unshare") is not None:
        assert box("unshare") is None
        return
    root = tmp_path / "rootfs"
    for program in ("/bin/sh", "/bin/cat", "/bin/ls", "/bin/mkdir"):
        _with_libraries(program, root)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nweb:x:33:33::/:/bin/sh\n")
    (root / "etc/secret-of-the-image").write_text("hello\n")
    (root / "srv").mkdir()
    (root / "srv/task.txt").write_text("begin\n")

    async def use(sandbox: MachineSandbox) -> None:
        assert (await sandbox.exec("ls /usr/share 2>/dev/null; cat /etc/secret-of-the-image")).out == "hello\n"
        users = (await sandbox.exec("cat /etc/passwd")).out
        assert "web:x:33" in users
        assert "agent:x:" in users
        assert (
            await sandbox.exec("echo more >> /srv/task.txt && mkdir /opt && echo x > /opt/x && cat /srv/task.txt")
        ).out == "begin\nmore\n"
        changed = (await sandbox.diff()).files
        assert ("modified", "srv/task.txt") in changed
        assert ("added", "opt/x") in changed
        assert len(changed) == 2

    inside("unshare", use, files=Snapshot(root, root=True, how=how))
    assert (root / "srv/task.txt").read_text() == "begin\n"
    with pytest.raises(UserError, match="bubblewrap would need a Python in it"):
        choose_via("bwrap", root_file_system=True) if unavailable_reason("bwrap") is None else _refuse()


def _refuse() -> None:
    raise UserError("bubblewrap would need a Python in it")


def _with_libraries(program: str, root: Path) -> None:
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    libraries = [word for word in said.split() if word.startswith("/")]
    for path in (program, *libraries):
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(path).read_bytes())
        target.chmod(0o755)


def test_overlay_snapshot_uses_disk_quota_only_for_written_files(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(8 << 20))

    async def run() -> str | None:
        async with make_sandbox(
            "local", files=Snapshot(tmp_path, how="overlay"), limits=SandboxLimits(disk_mb=4)
        ) as sandbox:
            assert (await sandbox.exec("wc -c < large")).out.strip() == str(8 << 20)
            return (await sandbox.exec("echo >> large")).cause

    if unavailable_reason("unshare") is not None:
        assert box("unshare") is None
        return
    assert asyncio.run(run()) == "disk"


def test_a_root_file_system_needs_the_local_sandbox(tmp_path: Path) -> None:
    async def run() -> None:
        async with make_sandbox("subprocess", files=Snapshot(tmp_path, root=True)):
            pass

    with pytest.raises(UserError, match="a root file system as a snapshot needs the local sandbox"):
        asyncio.run(run())
