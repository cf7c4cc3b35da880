"""System calls without a Python wrapper, and a seccomp filter, for Linux on x86_64 and aarch64."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE = 428
_MOVE_MOUNT = 429
_MOUNT_SETATTR = 442
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 1
_MOUNT_ATTR_NOSUID = 2
_MOUNT_ATTR_NODEV = 4
_MOUNT_ATTR_IDMAP = 0x00100000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
_HIGHEST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)
IS_LINUX = sys.platform.startswith("linux")


def _check_result(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process into new namespaces of the kinds that the flags name."""
    _check_result(_libc.unshare(ctypes.c_int(flags)), "unshare")


def enter_network(pid: int) -> None:
    """Enter the network namespace of a process, entering its user namespace first where that differs from ours."""
    own = os.stat("/proc/self/ns/user").st_ino
    for kind, flag in (("user", CLONE_NEWUSER), ("net", CLONE_NEWNET)):
        descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if kind == "net" or os.fstat(descriptor).st_ino != own:
                _check_result(_libc.setns(descriptor, ctypes.c_int(flag)), f"setns {kind}")
        finally:
            os.close(descriptor)


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """Call mount(2)."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    _check_result(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount; it is released after its last use."""
    _check_result(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make one folder the root and move the present root to another."""
    number = _PIVOT_ROOT[os.uname().machine]
    _check_result(_libc.syscall(number, os.fsencode(new_root), os.fsencode(put_old)), "pivot_root")


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one argument."""
    _check_result(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def die_with_parent(signum: int = 9) -> None:
    """Have the kernel send this process a signal when the thread that forked it ends.

    A change of its credentials clears the setting.
    """
    prctl(PR_SET_PDEATHSIG, signum)


def drop_capabilities() -> None:
    """Drop all capabilities, and prevent executed programs from gaining any."""
    for capability in range(_HIGHEST_CAPABILITY + 1):
        _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)  # fails where the kernel does not know one
    header = ctypes.create_string_buffer(struct.pack("<Ii", _CAPABILITY_VERSION_3, 0))
    nothing = ctypes.create_string_buffer(24)
    _check_result(_libc.syscall(_CAPSET[os.uname().machine], header, nothing), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def make_read_only(target: str) -> None:
    """Make a mount and all mounts below it read-only, without set-uid programs and devices."""
    attributes = struct.pack("<QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    _set_attributes(_AT_FDCWD, target, _AT_RECURSIVE, attributes)


def bind_with_owner(source: str, target: str, user_namespace: int) -> None:
    """Mount `source` read-only at `target`, with owners mapped as the user namespace says."""
    tree = _check_result(
        _libc.syscall(_OPEN_TREE, ctypes.c_long(_AT_FDCWD), os.fsencode(source), ctypes.c_long(_OPEN_TREE_CLONE)),
        f"open_tree {source}",
    )
    try:
        attributes = struct.pack("<QQQQ", _MOUNT_ATTR_IDMAP | _MOUNT_ATTR_RDONLY, 0, 0, user_namespace)
        _set_attributes(tree, "", _AT_EMPTY_PATH, attributes)
        arguments = (tree, b"", ctypes.c_long(_AT_FDCWD), os.fsencode(target), ctypes.c_long(_MOVE_MOUNT_F_EMPTY_PATH))
        _check_result(_libc.syscall(_MOVE_MOUNT, *arguments), f"move_mount {target}")
    finally:
        os.close(tree)


def _set_attributes(folder: int, path: str, flags: int, attributes: bytes) -> None:
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    arguments = (
        ctypes.c_long(folder),
        os.fsencode(path),
        ctypes.c_long(flags),
        buffer,
        ctypes.c_size_t(len(attributes)),
    )
    _check_result(_libc.syscall(_MOUNT_SETATTR, *arguments), f"mount_setattr {path}")


def run_in_fork(run: Callable[[], None]) -> int:
    """Fork, run the function in the child, which then exits even if it raises, and return the child's pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except Exception as error:  # noqa: BLE001 (reported, and the fork exits)
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


# The seccomp filter for all processes of a sandbox forbids system calls that agents do not need and that exploits of
# the kernel have used.
#
# Invariant: the filter only forbids. System calls that it does not name work as before. Those that it names fail as on
# a kernel built without them (ENOSYS) or for a user without the permission (EPERM), so programs use their fallbacks.

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MISSING_CALLS = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "clone3": (435, 435),
}  # fmt: skip
"""Numbers on x86_64 and aarch64. The flags of `clone3` are in memory that a filter cannot read; libraries fall back."""
FORBIDDEN_CALLS = {
    "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "fanotify_init": (300, 262), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "syslog": (103, 116), "vhangup": (153, 58),
    "kcmp": (312, 272),
}  # fmt: skip
SOCKET, SOCKETPAIR, CLONE, IOCTL = (41, 198), (53, 199), (56, 220), (16, 29)
FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6, and netlink, which the C library uses to list addresses; not vsock, which no namespace isolates."""
NEW_NAMESPACES = 0x7E020000
TYPE_INTO_TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX."""
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

Step = tuple[int, int, str | None, str | None]
"""Operation, value, and the labels to jump to if the comparison holds and if not; None: the next step."""


def seccomp_program(machine: str) -> bytes:
    """Build the filter for a machine architecture as BPF instructions in the kernel's format."""
    column = tuple(ARCHITECTURES).index(machine)
    steps: list[Step | str] = [
        (_LOAD, _ARCHITECTURE, None, None),
        (_EQUAL, ARCHITECTURES[machine], None, "not there"),  # 32-bit programs use other numbers
        (_LOAD, _NUMBER, None, None),
    ]
    if machine == "x86_64":
        steps.append((_AT_LEAST, _X32, "not there", None))
    steps += [(_EQUAL, numbers[column], "not there", None) for numbers in MISSING_CALLS.values()]
    steps += [(_EQUAL, numbers[column], "forbidden", None) for numbers in FORBIDDEN_CALLS.values()]
    for numbers, label in ((SOCKET, "socket"), (SOCKETPAIR, "socket"), (CLONE, "clone"), (IOCTL, "ioctl")):
        steps.append((_EQUAL, numbers[column], label, None))
    steps += ["allowed", (_RETURN, _ALLOW, None, None)]
    steps += ["socket", (_LOAD, _FIRST, None, None)]
    steps += [(_EQUAL, family, "allowed socket", None) for family in FAMILIES]
    steps += [(_RETURN, _FAIL | errno.EAFNOSUPPORT, None, None), "allowed socket", (_RETURN, _ALLOW, None, None)]
    steps += ["clone", (_LOAD, _FIRST, None, None), (_ANY_BIT, NEW_NAMESPACES, "forbidden", None)]
    steps += [(_RETURN, _ALLOW, None, None)]
    steps += ["ioctl", (_LOAD, _SECOND, None, None)]
    steps += [(_EQUAL, request, "forbidden", None) for request in TYPE_INTO_TERMINAL]
    steps += [(_RETURN, _ALLOW, None, None)]
    steps += ["forbidden", (_RETURN, _FAIL | errno.EPERM, None, None)]
    steps += ["not there", (_RETURN, _FAIL | errno.ENOSYS, None, None)]
    places: dict[str, int] = {}
    operations: list[Step] = []
    for step in steps:
        if isinstance(step, str):
            places[step] = len(operations)
        else:
            operations.append(step)

    def distance(label: str | None, at: int) -> int:
        return 0 if label is None else places[label] - at - 1

    return b"".join(
        struct.pack("=HBBI", operation, distance(yes, at), distance(no, at), value)
        for at, (operation, value, yes, no) in enumerate(operations)
    )


def install_seccomp() -> bool:
    """Install the filter permanently on this process and all its children; False where the kernel has no filters."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        return False
    filters = seccomp_program(machine)
    buffer = ctypes.create_string_buffer(filters, len(filters))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filters) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), header, 0, 0) == 0
