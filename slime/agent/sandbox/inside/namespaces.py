"""Isolates the first process of a sandbox: new namespaces, a root folder of its own, and no privileges.

Nothing is written to the host's disk: the new root is assembled in a mount namespace that ends with its last process.
Mount sources are looked up in the old root, which is detached before the first request is served.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence

from . import syscalls

TYPE_CHECKING = False  # importing `typing` would take a fifth of a start
if TYPE_CHECKING:
    from .fd_messages import JsonMapping

BASE = "/tmp"
"""A folder that exists on every Linux; mounted over in the sandbox's mount namespace only, while the root is built."""
_OLD, _NEW, _SCRATCH, _LOWER, _VIEW = "/old", "/new", "/scratch", "/lower", "/view"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "crypto-policies", "debian_version",
    "fonts", "inputrc", "java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "locale.alias", "localtime", "magic", "mime.types", "os-release", "pki", "profile", "profile.d",
    "protocols", "python3", "python3.11", "python3.12", "python3.13", "services", "ssl/certs", "ssl/openssl.cnf",
    "terminfo", "timezone", "vim",
)  # fmt: skip
"""Entries of the host's /etc that programs need. Accounts, hosts and resolvers are the sandbox's own."""
_READ_ONLY_REMOUNT = (
    syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV
)
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


class SandboxRoot:
    """Descriptors of a sandbox's snapshot: the original folder, the present folder without the mounts in it, and the
    overlay's upper layer, if there is one."""

    def __init__(self, lower: int | None = None, present: int | None = None, upper: int | None = None) -> None:
        self.lower = lower
        self.present = present
        self.upper = upper
        self.filtered = False
        """A seccomp filter is installed."""


def isolate() -> None:
    """Enter new namespaces of all kinds except process and user, and bring up the loopback interface."""
    flags = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
    syscalls.unshare(flags)
    with contextlib.suppress(OSError):
        syscalls.unshare(syscalls.CLONE_NEWCGROUP)
    loopback_up()
    socket.sethostname("sandbox")
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)


def loopback_up() -> None:
    """Bring up 127.0.0.1 in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def build(spec: JsonMapping) -> SandboxRoot:
    """Assemble the new root at /new, with the old root at /old."""
    syscalls.mount("tmpfs", BASE, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0755,size=16m")
    for folder in (_OLD, _NEW, _SCRATCH, _LOWER, _VIEW):
        os.mkdir(BASE + folder)
    syscalls.pivot_root(BASE, BASE + _OLD)
    os.chdir("/")
    room = f"mode=0755,size={spec['disk_mb']}m,nr_inodes={spec['inodes']}"
    syscalls.mount("tmpfs", _SCRATCH, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, room)
    snapshot = spec["snapshot"]
    built = SandboxRoot()
    if snapshot is not None and snapshot["root"]:
        built = _mount_snapshot(spec, _NEW)
    else:
        syscalls.mount("tmpfs", _NEW, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0755,size=16m")
        _mount_system()
    _create_devices(spec["devices"])
    _make_folder(_NEW + "/proc")
    _create_own_folders(
        spec, {"/tmp": 0o1777, "/var/tmp": 0o1777, "/run": 0o755, "/dev/shm": 0o1777, spec["home"]: 0o755}
    )
    for inside in spec["visible"]:
        _bind_read_only(_OLD + inside, _NEW + inside)
    for path, text in spec["files"].items():
        _put_file(_NEW + path, text)
    if snapshot is None:
        _create_own_folders(spec, {spec["workdir"]: 0o755})
    elif not snapshot["root"]:
        _make_folder(_NEW + spec["workdir"])
        built = _mount_snapshot(spec, _NEW + spec["workdir"])
    elif not os.path.isdir(_NEW + spec["workdir"]):
        _create_own_folders(spec, {spec["workdir"]: 0o755})
    return built


def enter_root(spec: JsonMapping) -> None:
    """Make /new the root and detach the old root."""
    syscalls.mount("proc", _NEW + "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    for name in ("sys", "sysrq-trigger", "irq", "bus"):
        path = f"{_NEW}/proc/{name}"
        if name != "sys" and os.path.exists(path):
            with contextlib.suppress(OSError):
                syscalls.mount(path, path, None, syscalls.MS_BIND | syscalls.MS_REC)
                syscalls.make_read_only(path)
    os.chdir(_NEW)
    syscalls.pivot_root(".", ".")
    syscalls.unmount(".")
    os.chdir("/")
    if spec["snapshot"] is None or not spec["snapshot"]["root"]:
        syscalls.mount("none", "/", None, _READ_ONLY_REMOUNT)


def restore_old_root() -> str:
    """Restore the host's root for bubblewrap, which enters the new root itself; return the new root's path in it."""
    syscalls.pivot_root(_OLD, _OLD + BASE)
    os.chdir("/")
    return BASE + _NEW


def switch_user(uid: int) -> None:
    """Switch to another user id, with its own group only."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def enter_user_namespace(uid: int, gid: int, inner: int) -> None:
    """Enter a new user namespace that maps only this user, to the id `inner`."""
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    for file, text in (("setgroups", "deny"), ("uid_map", f"{inner} {uid} 1"), ("gid_map", f"{inner} {gid} 1")):
        with open(f"/proc/self/{file}", "w") as stream:
            stream.write(text)


def forbid_user_namespaces() -> None:
    """Forbid new user namespaces below this one, in which a process would have all capabilities."""
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def drop_privileges(spec: JsonMapping) -> None:
    """Become an ordinary user without capabilities, as a process that the sandbox's commands cannot inspect."""
    if not spec["rootless"]:
        switch_user(spec["uid"])
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # otherwise root owns the files of the user namespace
        with contextlib.suppress(OSError):  # the host may already forbid user namespaces
            enter_user_namespace(spec["uid"], spec["uid"], spec["uid"])
            forbid_user_namespaces()
    else:
        forbid_user_namespaces()
    syscalls.drop_capabilities()
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.die_with_parent()


def _mount_system() -> None:
    """Mount the host's /usr, its system folders and parts of its /etc read-only."""
    _bind_read_only(f"{_OLD}/usr", f"{_NEW}/usr")
    for name in _SYSTEM:
        source = f"{_OLD}/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), f"{_NEW}/{name}")
        elif os.path.isdir(source):
            _bind_read_only(source, f"{_NEW}/{name}")
    for name in _ETC:
        source = f"{_OLD}/etc/{name}"
        if os.path.islink(source):
            _make_folder(os.path.dirname(f"{_NEW}/etc/{name}"))
            os.symlink(os.readlink(source), f"{_NEW}/etc/{name}")
        elif os.path.exists(source):
            _bind_read_only(source, f"{_NEW}/etc/{name}")
    _make_folder(f"{_NEW}/var/lib")
    _make_folder(f"{_NEW}/root")


def _create_devices(others: Sequence[str]) -> None:
    """Create /dev with the standard devices, the given ones and pseudo-terminals."""
    _make_folder(f"{_NEW}/dev")
    syscalls.mount("tmpfs", f"{_NEW}/dev", "tmpfs", syscalls.MS_NOSUID, "mode=0755,size=1m")
    for path in (*_DEVICES, *others):
        source, target = _OLD + path, _NEW + path
        if os.path.exists(source):
            _put_file(target, "")
            syscalls.mount(source, target, None, syscalls.MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{_NEW}/dev/{name}")
    _make_folder(f"{_NEW}/dev/pts")
    with contextlib.suppress(OSError):
        flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
        syscalls.mount("devpts", f"{_NEW}/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=620")
        os.symlink("pts/ptmx", f"{_NEW}/dev/ptmx")


def _create_own_folders(spec: JsonMapping, folders: Mapping[str, int]) -> None:
    """Create writable folders with the given modes; all count against the sandbox's disk limit."""
    for inside, mode in folders.items():
        source = f"{_SCRATCH}/{inside.strip('/').replace('/', '-')}"
        os.mkdir(source)
        os.chmod(source, mode)
        os.chown(source, spec["file_uid"], spec["file_uid"])
        _make_folder(_NEW + inside)
        syscalls.mount(source, _NEW + inside, None, syscalls.MS_BIND)


def _mount_snapshot(spec: JsonMapping, target: str) -> SandboxRoot:
    """Mount the snapshot at `target`, writable and owned by the sandbox's user; the original is not changed."""
    source = _OLD + spec["snapshot"]["path"]
    upper, work = f"{_SCRATCH}/upper", f"{_SCRATCH}/work"
    os.mkdir(work)
    os.mkdir(upper)
    owner = os.stat(source)
    os.chown(upper, spec["file_uid"], spec["file_uid"])
    os.chmod(upper, stat.S_IMODE(owner.st_mode) | 0o700)
    if spec["snapshot"]["how"] != "copy":
        try:
            if spec["rootless"]:
                syscalls.mount(source, _LOWER, None, syscalls.MS_BIND | syscalls.MS_REC)
                options = ",userxattr"
            else:
                with _owner_mapping(owner, spec["file_uid"]) as user_namespace:
                    syscalls.bind_with_owner(source, _LOWER, user_namespace)
                options = ""
            layers = f"lowerdir={_LOWER},upperdir={upper},workdir={work}{options}"
            syscalls.mount("overlay", target, "overlay", syscalls.MS_NOSUID | syscalls.MS_NODEV, layers)
        except OSError:
            if spec["snapshot"]["how"] == "overlay":
                raise
        else:
            syscalls.mount(target, _VIEW, None, syscalls.MS_BIND)
            return SandboxRoot(_open_folder(_LOWER), _open_folder(_VIEW), _open_folder(upper))
    _copy_tree(source, upper, spec["file_uid"])
    syscalls.mount(upper, target, None, syscalls.MS_BIND)
    return SandboxRoot(_open_folder(source), _open_folder(upper))


def _open_folder(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextlib.contextmanager
def _owner_mapping(owner: os.stat_result, uid: int) -> Iterator[int]:
    """Hold a user namespace that maps the snapshot's owner to the sandbox's user; yield its descriptor."""
    ready, ready_write = os.pipe()
    go, go_write = os.pipe()

    def hold() -> None:
        os.close(go_write)
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        os.write(ready_write, os.fsencode(os.readlink(f"{_OLD}/proc/self")))  # the pid in the old root's /proc
        os.read(go, 1)

    pid = syscalls.run_in_fork(hold)
    os.close(ready_write)
    try:
        process = f"{_OLD}/proc/{os.read(ready, 32).decode()}"
        if process.endswith("/"):
            raise OSError(1, "cannot create a user namespace")
        for file, number in (("uid_map", owner.st_uid), ("gid_map", owner.st_gid)):
            with open(f"{process}/{file}", "w") as stream:
                stream.write(f"{number} {uid} 1")
        descriptor = os.open(f"{process}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        for end in (go, go_write, ready):
            os.close(end)
        os.waitpid(pid, 0)


def _copy_tree(source: str, target: str, uid: int) -> None:
    """Copy the regular files, links and folders in a folder, with their modes and times, to another owner."""
    for entry in os.scandir(source):
        path = os.path.join(target, entry.name)
        status = entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), path)
        elif entry.is_dir():
            os.mkdir(path)
            _copy_tree(entry.path, path, uid)
        elif entry.is_file():
            with open(entry.path, "rb") as old, open(path, "wb") as new:
                while os.sendfile(new.fileno(), old.fileno(), None, 1 << 30):
                    pass
        else:
            continue
        os.chown(path, uid, uid, follow_symlinks=False)
        if not entry.is_symlink():
            os.chmod(path, stat.S_IMODE(status.st_mode))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _bind_read_only(source: str, target: str) -> None:
    if os.path.isdir(source):
        _make_folder(target)
    else:
        _put_file(target, "")
    syscalls.mount(source, target, None, syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.make_read_only(target)


def _make_folder(path: str) -> None:
    """Create a folder and its parents; links on the way, which a snapshot may contain, are removed first."""
    parts = path.strip("/").split("/")
    for count in range(1, len(parts) + 1):
        folder = "/" + "/".join(parts[:count])
        if os.path.islink(folder):
            os.unlink(folder)
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o755)


def _put_file(path: str, text: str) -> None:
    _make_folder(os.path.dirname(path))
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, 0o644)
