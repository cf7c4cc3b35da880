"""A message as a file in shared memory: written once, mapped by as many processes of the machine as need it.

Invariant: what is read is what was written, whole, or a `DamagedMessage`. Arrays of a read message are the mapped
memory itself; who writes into one has a copy of the pages that he changed, and nobody else sees it. The file may be
removed while it is mapped.

A file is `<magic> <u64 bytes of the file> <u64 body bytes> <u32 n> <u64 begin, u64 size> x n  body`, then the buffers,
each from a place that suits any type of number.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from slime.cluster.message import DamagedMessage, Piece, pack, rest_of, some_at_a_time, unpack

_MAGIC = b"slimeMSG"
_HEAD = struct.Struct("<8sQQI")
_PLACE = struct.Struct("<QQ")
_ALIGNED = 64


class SharedMessage:
    """A message that is not written yet; `size` is what its file takes."""

    def __init__(self, obj: Any) -> None:
        self._packed = pack(obj)
        end = _HEAD.size + len(self._packed.buffers) * _PLACE.size + len(self._packed.body)
        self._begins: list[int] = []
        for buffer in self._packed.buffers:
            begin = -(-end // _ALIGNED) * _ALIGNED
            self._begins.append(begin)
            end = begin + buffer.size
        self.size = end

    def write(self, path: Path) -> None:
        """Into a new file. An `OSError` (no room) leaves what was written for the caller to remove.

        The interpreter is free for other threads while bytes are copied: several files are written at the same time.
        """
        body, buffers = self._packed.body, self._packed.buffers
        places = zip(self._begins, (buffer.size for buffer in buffers), strict=True)
        head = _HEAD.pack(_MAGIC, self.size, len(body), len(buffers))
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            _write(fd, [head, *(_PLACE.pack(*place) for place in places), body], 0)
            for begin, buffer in zip(self._begins, buffers, strict=True):
                _write(fd, buffer.pieces(), begin)
        finally:
            os.close(fd)


def read_message(path: str | Path) -> Any:
    """The message of a file, which is mapped for as long as somebody has one of its arrays."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise DamagedMessage(f"the message in {path} cannot be read: {error}") from error
    if len(mapped) < _HEAD.size:
        raise DamagedMessage(f"{path} has {len(mapped)} bytes, which is no message")
    magic, size, body_size, count = _HEAD.unpack_from(mapped)
    if magic != _MAGIC or size != len(mapped):
        raise DamagedMessage(f"{path} has {len(mapped)} bytes and should have {size}: it is no whole message")
    body = _HEAD.size + count * _PLACE.size
    if body + body_size > size:
        raise DamagedMessage(f"{path} announces more than it holds")
    places = list(_PLACE.iter_unpack(mapped[_HEAD.size : body]))
    if any(begin + length > size for begin, length in places):
        raise DamagedMessage(f"{path} announces more than it holds")
    buffers = [np.frombuffer(mapped, np.uint8, count=length, offset=begin) for begin, length in places]
    try:
        return unpack(mapped[body : body + body_size], buffers)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise DamagedMessage(f"the message in {path} cannot be read: {error}") from error


def _write(fd: int, pieces: Iterable[Piece], begin: int) -> None:
    for some in some_at_a_time(pieces):
        while some:
            written = os.pwritev(fd, some, begin)  # perhaps not all of it: two GiB at most
            begin += written
            some = rest_of(some, written)
