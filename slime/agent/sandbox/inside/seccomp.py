"""A filter of system calls, for all that runs in a sandbox: what no agent needs and kernels were broken through.

Invariant: the filter only forbids. Everything that is not named works as before, and what is named fails as on a kernel
that was built without it (ENOSYS) or for a user without the right (EPERM), so programs take their other way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NOT_THERE = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "clone3": (435, 435),
}  # fmt: skip
"""Numbers on x86_64 and aarch64. The flags of `clone3` are in memory, out of a filter's sight; libraries fall back."""
FORBIDDEN = {
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
"""Unix, IPv4, IPv6 and netlink, which the C library asks for addresses; not vsock, which no namespace holds."""
NEW_NAMESPACES = 0x7E020000
TYPE_INTO_TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX."""
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

Step = tuple[int, int, str | None, str | None]
"""Operation, value, and the labels to go on at if it holds and if not; None: with the next step."""


def program(machine: str) -> bytes:
    """The filter for a machine, as the kernel takes it."""
    column = tuple(ARCHITECTURES).index(machine)
    steps: list[Step | str] = [
        (_LOAD, _ARCHITECTURE, None, None),
        (_EQUAL, ARCHITECTURES[machine], None, "not there"),  # programs of 32 bits have numbers of their own
        (_LOAD, _NUMBER, None, None),
    ]
    if machine == "x86_64":
        steps.append((_AT_LEAST, _X32, "not there", None))
    steps += [(_EQUAL, numbers[column], "not there", None) for numbers in NOT_THERE.values()]
    steps += [(_EQUAL, numbers[column], "forbidden", None) for numbers in FORBIDDEN.values()]
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
    return _assembled(steps)


def _assembled(steps: Sequence[Step | str]) -> bytes:
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


def install() -> bool:
    """Put the filter on this process and all that it starts, for good; False where the kernel has no filters."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        return False
    filters = program(machine)
    buffer = ctypes.create_string_buffer(filters, len(filters))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filters) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), header, 0, 0) == 0
