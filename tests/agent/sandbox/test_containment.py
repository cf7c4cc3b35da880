"""Containment: effects of hostile or broken commands stay in their sandbox, end with it, and have a named cause."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
import struct
from pathlib import Path

import pytest

from slime.agent.sandbox import SandboxError, SandboxGone, SandboxLimits
from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.agent.sandbox.inside import syscalls
from slime.agent.sandbox.local import unavailable_reason
from tests.agent.sandbox.boxes import ALL, LOCAL, alive, box, inside, wait_until

QUICK = SandboxLimits(grace_seconds=0.1)


def new_mark() -> str:
    return f"sandbox-mark-{os.urandom(8).hex()}"


@pytest.mark.parametrize("way", LOCAL)
def test_fork_bomb_hits_the_process_limit_and_leaves_no_process(way: str) -> None:
    mark = new_mark()

    async def use(sandbox: MachineSandbox) -> None:
        until_one_complains = "for round in $(seq 100); do test -s complaints && break; sleep 0.1 || break; done"
        line = f"exec 2> complaints; b() {{ b | b & }}; b; {until_one_complains}"
        bomb = await sandbox.exec(line, env={"MARK": mark}, timeout=100)
        assert bomb.cause == ("processes" if "processes" in sandbox.held else bomb.cause)
        again = await sandbox.exec("sleep 0.2; sleep 0.2; sleep 0.2", timeout=100)
        assert again.cause in ("processes", None)

    inside(way, use, limits=SandboxLimits(processes=48, grace_seconds=0.1))
    assert alive(mark) == []


@pytest.mark.parametrize("way", LOCAL)
def test_sandbox_survives_a_fork_bomb_that_times_out(way: str) -> None:
    mark = new_mark()

    async def use(sandbox: MachineSandbox) -> None:
        line = "b() { b | b & }; while :; do b; done"
        bomb = await sandbox.exec(line, env={"MARK": mark}, timeout=0.5)
        assert bomb.cause in ("timeout", "processes", "killed")
        await sandbox.box.sweep(own_processes=sandbox.own_processes)
        await asyncio.to_thread(wait_until, lambda: not alive(mark))
        while (outcome := await sandbox.exec("echo here")).cause == "processes":
            pass  # the process slots of the last ones are being freed
        assert outcome.out == "here\n"

    inside(way, use, limits=SandboxLimits(processes=48, grace_seconds=0.1))


@pytest.mark.parametrize("way", ALL)
def test_memory_limit_ends_a_command(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        hog = await sandbox.exec([sandbox.python, "-I", "-c", "x = bytearray(1 << 30); print(len(x))"])
        assert hog.cause == "memory"
        assert hog.code != 0
        assert (await sandbox.exec("echo here")).out == "here\n"

    inside(way, use, limits=SandboxLimits(memory_mb=256))


@pytest.mark.parametrize("way", ALL)
def test_output_limits_truncate_and_end_a_command(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        endless = await sandbox.exec("echo begin; yes")
        assert (endless.code, endless.cause, endless.truncated) == (-1, "output", True)
        assert endless.out.startswith("begin\ny\n")
        assert "bytes left out" in endless.out
        assert len(endless.out) < 5000
        long = await sandbox.exec("seq 100000")
        assert (long.code, long.cause, long.truncated) == (0, None, True)
        assert long.out.startswith("1\n2\n")
        assert long.out.endswith("99999\n100000\n")

    inside(way, use, limits=SandboxLimits(output_kb=4, output_mb=2, grace_seconds=0.1))


@pytest.mark.parametrize("way", ALL)
def test_file_size_limit_applies_to_commands_and_writes(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        assert (await sandbox.exec("head -c 9000000 /dev/zero > huge")).cause == "file size"
        code = "open('huge', 'wb').write(bytes(9_000_000))"
        assert (await sandbox.exec([sandbox.python, "-I", "-c", code])).cause == "file size"
        assert len(await sandbox.read_bytes("huge")) == 4 << 20
        with pytest.raises(SandboxError, match="more than the 4194304 bytes"):
            await sandbox.write_file("huge", bytes(5_000_000))

    inside(way, use, limits=SandboxLimits(file_mb=4))


@pytest.mark.parametrize("way", LOCAL)
def test_disk_limit_covers_bytes_and_file_count(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        full = await sandbox.exec(
            "for place in . /tmp ~ /run; do head -c 7000000 /dev/zero > $place/part || exit 1; done"
        )
        assert full.cause == "disk"
        many = await sandbox.exec("rm -f part /tmp/part; mkdir -p x; cd x; seq -f f%g 40000 | xargs touch")
        assert many.cause == "disk"

    inside(way, use, limits=SandboxLimits(disk_mb=16))


@pytest.mark.parametrize("way", ALL)
def test_cpu_time_limit_ends_a_busy_loop(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        assert (await sandbox.exec("while :; do :; done")).cause == "cpu time"

    inside(way, use, limits=SandboxLimits(cpu_seconds=1))


@pytest.mark.parametrize("way", ALL)
@pytest.mark.parametrize(
    "line",
    [
        "setsid sh -c 'setsid nohup sleep 600 & sleep 600' & sleep 600",
        "(sleep 600 &) ; sleep 600",
        "kill -STOP $$; sleep 600",
        "sleep 600 & kill -STOP $!; wait",
        "trap '' TERM HUP INT; sleep 600; sleep 600",
    ],
    ids=["daemons", "double fork", "stopped", "stopped child", "ignores SIGTERM"],
)
def test_timeout_ends_every_process_of_a_command(way: str, line: str) -> None:
    mark = new_mark()

    async def use(sandbox: MachineSandbox) -> None:
        late = await sandbox.exec(line, env={"MARK": mark}, timeout=0.3)
        assert (late.code, late.cause) == (-1, "timeout")
        await asyncio.to_thread(wait_until, lambda: not alive(mark))

    inside(way, use, limits=QUICK)


@pytest.mark.parametrize("way", ALL)
def test_command_ends_even_if_it_kills_or_stops_its_watcher(way: str) -> None:
    mark = new_mark()

    async def use(sandbox: MachineSandbox) -> None:
        sandbox.overdue_s = 0.5
        killer = await sandbox.exec("(setsid sleep 600 &); kill -9 $PPID; sleep 600", env={"MARK": mark})
        assert (killer.code, killer.cause) == (-1, "killed")
        await asyncio.to_thread(wait_until, lambda: not alive(mark))
        stopper = await sandbox.exec("kill -STOP $PPID; sleep 600", env={"MARK": mark}, timeout=0.2)
        assert (stopper.code, stopper.cause) == (-1, "timeout")
        await asyncio.to_thread(wait_until, lambda: not alive(mark))
        assert (await sandbox.exec("echo here")).out == "here\n"

    inside(way, use, limits=QUICK)


@pytest.mark.parametrize("way", LOCAL)
def test_sandbox_survives_a_command_that_kills_all_visible_processes(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        assert (await sandbox.exec("kill -STOP 1; kill -KILL 1; kill -KILL -1")).cause == "killed"
        assert (await sandbox.exec("echo here")).out == "here\n"

    inside(way, use)


@pytest.mark.parametrize("way", LOCAL)
def test_host_files_are_unreadable_through_links_and_proc(way: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not for agents")
    tmp_path.chmod(0o755)
    secret.chmod(0o644)

    async def use(sandbox: MachineSandbox) -> None:
        for number, target in enumerate((secret, "/etc/shadow", f"/proc/1/root{secret}", f"../../../../..{secret}")):
            await sandbox.exec(f"ln -s {target} link{number}")
            for path in (f"link{number}", str(target)):
                with pytest.raises((FileNotFoundError, PermissionError)):
                    await sandbox.read_file(path)
        await sandbox.exec(f"mkdir -p {tmp_path} 2>/dev/null; ln -sfn / around")
        with pytest.raises((FileNotFoundError, PermissionError, SandboxError)):
            await sandbox.read_file(f"around{secret}")
        await sandbox.exec(f"ln -s {secret} out")
        await sandbox.write_file("out", "changed")  # the sandbox has its own /tmp
        found = await sandbox.exec(
            f"cat {secret} /proc/*/root{secret} /proc/*/cwd/../..{secret} 2>/dev/null; ls /root /home"
        )
        assert "not for agents" not in found.out
        assert (await sandbox.exec("ls -A /home /root | grep -v pyenv; find / -xdev -name '*.jsonl' | head")).out.count(
            "agent"
        ) == 1

    inside(way, use)
    assert secret.read_text() == "not for agents"


@pytest.mark.parametrize("way", LOCAL)
def test_proc_hides_memory_and_environment_of_outside_processes(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        tries = "cat /proc/1/environ /proc/1/mem /proc/$PPID/environ /proc/$PPID/mem; ls -l /proc/1/fd /proc/1/cwd"
        outcome = await sandbox.exec(f"({tries}) 2>&1 >/dev/null")
        refused = outcome.out.count("Permission denied") + outcome.out.count("cannot read symbolic link")
        assert refused >= 5, outcome.out
        pids = (await sandbox.exec("ls /proc | grep -c '^[0-9]'")).out
        assert int(pids) < 10
        assert str(os.getpid()) not in (await sandbox.exec("ls /proc")).out.split()

    inside(way, use)


@pytest.mark.parametrize("way", LOCAL)
def test_command_has_no_capabilities_and_cannot_gain_privileges(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        status = (await sandbox.exec("grep -E '^(Cap|NoNewPrivs|Groups)' /proc/self/status")).out
        assert {line.split()[-1] for line in status.splitlines() if line.startswith("Cap")} == {"0" * 16}
        assert "NoNewPrivs:\t1" in status
        assert (await sandbox.exec("id -u")).out.strip() != "0"
        assert (await sandbox.exec("ls /proc/self/fd")).out.split() == ["0", "1", "2", "3"]  # 3 belongs to ls itself
        for line in (
            "unshare -U true",
            "unshare -rm true",
            "mount -t tmpfs none /tmp",
            "chown 0 .",
            "touch /usr/x",
            "touch /x",
        ):
            assert (await sandbox.exec(line)).code != 0, line
        assert (await sandbox.exec("touch /tmp/x ~/x x /var/tmp/x /dev/shm/x && echo yes")).out == "yes\n"

    inside(way, use)


@pytest.mark.parametrize("way", LOCAL)
def test_sandbox_has_only_a_loopback_network(way: str) -> None:
    name = f"\0{new_mark()}"
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()

        async def use(sandbox: MachineSandbox) -> None:
            code = f"""
import errno, socket
def tried(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(5)
        return errno.errorcode[sock.connect_ex(address)]
print(tried(socket.AF_INET, ("127.0.0.1", {port.getsockname()[1]})))
print(tried(socket.AF_INET, ("192.0.2.1", 80)), tried(socket.AF_INET, ("8.8.8.8", 53)))
try:
    tried(socket.AF_UNIX, {name!r})
except OSError as error:
    print(error.errno)
else:
    print(tried(socket.AF_UNIX, {name!r}))
"""
            out = (await sandbox.exec([sandbox.python, "-I", "-c", code])).out.split()
            assert out == ["ECONNREFUSED", "ENETUNREACH", "ENETUNREACH", "ECONNREFUSED"]
            assert "options timeout:1 attempts:1" in await sandbox.read_file("/etc/resolv.conf")
            assert (
                await sandbox.exec("ls /sys/class/net 2>/dev/null; sed 1,2d /proc/net/dev | cut -d: -f1")
            ).out.split() == ["lo"]

        inside(way, use)


@pytest.mark.parametrize("way", LOCAL)
def test_two_sandboxes_do_not_see_each_other(way: str) -> None:
    async def use(one: MachineSandbox) -> None:
        async def other(two: MachineSandbox) -> None:
            await one.exec("echo mine > /tmp/x; (setsid sleep 600 &)")
            assert (await two.exec("cat /tmp/x; ls -d /tmp/x; pgrep sleep")).out == ""
            ids = [(await sandbox.exec("id -u")).out for sandbox in (one, two)]
            assert os.geteuid() != 0 or ids[0] != ids[1]

        await asyncio.to_thread(inside, way, other)

    inside(way, use)


@pytest.mark.parametrize("way", ALL)
def test_killing_the_monitor_ends_the_sandbox_and_its_processes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.agent.sandbox.inside.cgroups._REMOVAL_S", 60.0)
    mark = new_mark()

    async def use(sandbox: MachineSandbox) -> None:
        await sandbox.exec("(setsid sleep 600 & setsid sh -c 'kill -STOP $$' &); sleep 0.05", env={"MARK": mark})
        assert alive(mark)
        process = sandbox.box._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: not alive(mark))
        process.wait()
        with pytest.raises(SandboxGone):
            await sandbox.exec("true")
        folders.extend(sandbox.box.told["folders"])

    folders: list[str] = []
    inside(way, use)
    assert not [folder for folder in folders if os.path.exists(folder)]


def test_refusal_names_an_unsupported_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    unavailable_reason.cache_clear()
    try:
        monkeypatch.setattr("sys.platform", "darwin")
        assert unavailable_reason("unshare") == "namespaces need Linux, and this is darwin"
    finally:
        monkeypatch.undo()
        unavailable_reason.cache_clear()


@pytest.mark.parametrize("way", ALL)
def test_cancelled_start_leaves_no_process_or_cgroup(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = box(way)
    if made is None:
        return
    seen: list[int] = []

    async def run() -> None:
        begun = asyncio.Event()

        async def never(sock: socket.socket) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr("slime.agent.sandbox.monitor_client.receive", never)
        task = asyncio.create_task(made.__aenter__())
        await begun.wait()
        assert made._box is not None
        assert made._box._process is not None
        seen.append(made._box._process.pid)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not os.path.exists(f"/proc/{seen[0]}")
    assert not os.path.exists(f"/sys/fs/cgroup/pids/slime-sandbox-{seen[0]}")


NESTED = """
import asyncio
from slime.agent.sandbox import make_sandbox

for kind in ("auto", "local"):
    try:
        make_sandbox(kind)
    except Exception as error:
        print(type(error).__name__, error)

async def main():
    async with make_sandbox("subprocess") as sandbox:
        print(sandbox.kind, (await sandbox.exec("echo here")).out, end="")

asyncio.run(main())
"""


def test_nested_sandbox_is_refused_except_for_subprocess() -> None:
    """A sandbox itself forbids namespaces, so this test runs inside one."""
    root = Path(__file__).parents[3]

    async def use(sandbox: MachineSandbox) -> None:
        inner = await sandbox.exec([sandbox.python, "-c", NESTED])
        auto, local, worked = inner.out.splitlines()
        assert auto == local
        assert auto.startswith("UserError this machine has no local sandbox: unshare: ")
        assert auto.endswith("only for code that you trust, --sandbox subprocess, which is not a security boundary")
        assert worked == "subprocess here"
        assert inner.err.startswith("--sandbox subprocess is not a security boundary: code from a model runs with the")

    inside("unshare", use, visible=[root / "slime"], env={"PYTHONPATH": str(root)})


HAS_FILTERS = Path("/proc/sys/kernel/seccomp/actions_avail").exists()
SYSTEM_CALLS = """
import ctypes, errno, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
said = {}
for name, number in json.loads(sys.argv[1]).items():
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    said[name] = errno.errorcode[ctypes.get_errno()]
pid = libc.syscall(ctypes.c_long(int(sys.argv[2])), ctypes.c_long(0x10000000 | 17), 0, 0, 0, 0)
if pid == 0:
    os._exit(0)
said["clone"] = errno.errorcode[ctypes.get_errno()] if pid < 0 else "a user namespace"
for family in (1, 2, 10, 16, 17, 38, 40):
    try:
        socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM).close()
        said[family] = "ok"
    except OSError as error:
        said[family] = errno.errorcode[error.errno]
said["thread"] = __import__("concurrent.futures").futures.ThreadPoolExecutor().submit(os.getpid).result() == os.getpid()
print(json.dumps(said))
"""


@pytest.mark.parametrize("way", LOCAL)
def test_seccomp_filter_blocks_the_listed_system_calls(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        column = tuple(syscalls.ARCHITECTURES).index(os.uname().machine)
        numbers = {name: both[column] for name, both in {**syscalls.MISSING_CALLS, **syscalls.FORBIDDEN_CALLS}.items()}
        words = [sandbox.python, "-I", "-c", SYSTEM_CALLS, json.dumps(numbers), str(syscalls.CLONE[column])]
        outcome = await sandbox.exec(words)
        assert outcome.code == 0, outcome.err
        said = json.loads(outcome.out)
        assert sandbox.filtered == HAS_FILTERS
        if not HAS_FILTERS:
            return
        assert {said[name] for name in syscalls.MISSING_CALLS} == {"ENOSYS"}
        assert {said[name] for name in syscalls.FORBIDDEN_CALLS} == {"EPERM"}
        assert said["clone"] == "EPERM"
        assert [said[str(family)] for family in (1, 2, 10, 16)] == ["ok"] * 4
        assert [said[str(family)] for family in (17, 38, 40)] == ["EAFNOSUPPORT"] * 3
        assert said["thread"]

    inside(way, use)


def filtered(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Interpret the BPF program of the filter and return its verdict on a call."""
    code = syscalls.seccomp_program(machine)
    data = struct.pack(
        "=IIQ6Q", number, architecture or syscalls.ARCHITECTURES[machine], 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6]
    )
    at = value = 0
    while True:
        operation, yes, no, constant = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif operation == 0x06:
            return int(constant)
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[operation]
            at += yes if holds else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_blocks_exactly_the_listed_calls_of_each_architecture(machine: str) -> None:
    column = tuple(syscalls.ARCHITECTURES).index(machine)
    allow, fail = 0x7FFF0000, 0x00050000
    forbidden = {both[column] for both in syscalls.FORBIDDEN_CALLS.values()}
    not_there = {both[column] for both in syscalls.MISSING_CALLS.values()}
    for number in range(500):
        answer = fail | errno.EPERM if number in forbidden else fail | errno.ENOSYS if number in not_there else allow
        assert filtered(machine, number, 1, 0x5401) == answer, number
    assert filtered(machine, syscalls.SOCKET[column], 40) == fail | errno.EAFNOSUPPORT
    assert filtered(machine, syscalls.SOCKETPAIR[column], 30) == fail | errno.EAFNOSUPPORT
    assert filtered(machine, syscalls.CLONE[column], 0x10000011) == fail | errno.EPERM
    assert filtered(machine, syscalls.CLONE[column], 0x3D0F00) == allow  # a thread
    assert filtered(machine, syscalls.IOCTL[column], 0, 0x5412) == fail | errno.EPERM
    assert filtered(machine, 0, architecture=0x40000003) == fail | errno.ENOSYS  # a 32-bit call
    assert filtered(machine, 0x40000000) == (fail | errno.ENOSYS if machine == "x86_64" else allow)


def test_system_call_numbers_match_the_kernel_headers() -> None:
    """Compares with the installed Linux headers, which have both files on every architecture; skips missing files."""
    files = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    named = {
        **syscalls.MISSING_CALLS, **syscalls.FORBIDDEN_CALLS, "socket": syscalls.SOCKET, "socketpair": syscalls.SOCKETPAIR,
        "clone": syscalls.CLONE, "ioctl": syscalls.IOCTL,
    }  # fmt: skip
    for column, file in enumerate(files):
        text = Path(file).read_text() if Path(file).exists() else ""
        found = {name: int(number) for name, number in re.findall(r"__NR(?:3264)?_(\w+)[ \t]+(\d+)\b", text)}
        assert {name: found.get(name, both[column]) for name, both in named.items()} == {
            name: both[column] for name, both in named.items()
        }
