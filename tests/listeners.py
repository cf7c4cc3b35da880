"""Addresses of listening sockets, read from /proc."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

LISTENS = "0A"


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """Returns the addresses on which these processes accept TCP connections."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and rest[5] in inodes:
                words = bytes.fromhex(local.partition(":")[0])
                found.add(socket.inet_ntop(family, b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))))
    return found


def _sockets(pid: int) -> Iterable[str]:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]
