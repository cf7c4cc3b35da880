"""Packs messages between processes as bytes: a msgpack body plus buffers for large numpy arrays, never pickles.

Invariant: an unpacked message equals the packed one; its arrays have the same dtypes and shapes and are writable. Small
arrays are inside the msgpack body; large ones are separate buffers, whose pieces are the arrays' own memory if
possible. A message that cannot be packed is rejected as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgpack
import numpy as np

OUT_OF_BAND_BYTES = 64 * 1024
PIECES_AT_ONCE = 512
"""Pieces in one system call, which takes at most 1,024."""
_EXT_INLINE_ARRAY = 1
_EXT_BUFFER_ARRAY = 2
_BUFFER_FORMATS = "?bBhHiIlLqQfd"

Piece = bytes | memoryview


class DamagedMessage(Exception):
    """Raised when received bytes are not a complete message in this format."""


class ConcatenatedArrays:
    """Arrays that are sent as one concatenated array, without being copied together here.

    As in `np.concatenate`, the result has their common dtype, and shapes must agree except in the first dimension.
    """

    def __init__(self, parts: Sequence[np.ndarray], dtype: np.dtype | None = None) -> None:
        kinds = {part.dtype for part in parts}
        self.parts = parts
        self.dtype = dtype or (np.result_type(*kinds) if kinds else np.dtype(np.float64))
        self.is_mixed = not kinds <= {self.dtype}
        rows = {part.shape[1:] for part in parts if part.ndim != 1}
        if rows and (len(rows) > 1 or any(part.ndim == 1 for part in parts)):
            raise ValueError(f"arrays of rows of different shapes cannot be joined: {sorted(rows)}")
        self.rows: tuple[int, ...] = rows.pop() if rows else ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(map(len, self.parts)), *self.rows)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """Return the concatenated array, in its own memory."""
        return np.concatenate([np.empty((0, *self.shape[1:]), self.dtype), *self.parts], dtype=self.dtype)


@dataclass(frozen=True)
class Buffer:
    """Bytes that follow the body: those of consecutive arrays."""

    parts: Sequence[np.ndarray]
    dtype: np.dtype
    size: int

    def pieces(self) -> Iterator[memoryview]:
        """Yield contiguous memory for sockets and files; arrays that need a copy are copied one at a time."""
        plain = self.dtype.char in _BUFFER_FORMATS and self.dtype.isnative
        for part in self.parts:
            if part.size:
                whole = np.ascontiguousarray(part, dtype=self.dtype)
                yield whole.data if plain else whole.reshape(-1).view(np.uint8).data


def pack(obj: object) -> tuple[bytes, list[Buffer]]:
    """Pack a message as its body and its buffers."""
    buffers: list[Buffer] = []

    def encode(value: object) -> object:
        content: bytes | int
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray | ConcatenatedArrays):
            raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} can't travel over a channel")
        dtype = value.dtype
        if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
            raise TypeError(f"an array of dtype {dtype} can't travel over a channel: only plain numbers and strings")
        if value.nbytes <= OUT_OF_BAND_BYTES:
            whole = value.whole() if isinstance(value, ConcatenatedArrays) else value
            code, content = _EXT_INLINE_ARRAY, whole.tobytes()
        else:
            code, content = _EXT_BUFFER_ARRAY, len(buffers)
            parts = value.parts if isinstance(value, ConcatenatedArrays) else [value]
            buffers.append(Buffer(parts, dtype, value.nbytes))
        return msgpack.ExtType(code, msgpack.packb([dtype.str, list(value.shape), content]))

    return msgpack.packb(obj, default=encode, use_bin_type=True, unicode_errors="surrogatepass"), buffers


def unpack(body: bytes | bytearray, buffers: Sequence[np.ndarray]) -> Any:
    """Unpack a body and its buffers, which become the message's arrays."""

    def decode(code: int, data: bytes) -> np.ndarray:
        if code not in (_EXT_INLINE_ARRAY, _EXT_BUFFER_ARRAY):
            raise DamagedMessage(f"a message holds an unknown extension type {code}")
        dtype, shape, content = msgpack.unpackb(data)
        flat = buffers[content] if code == _EXT_BUFFER_ARRAY else np.frombuffer(bytearray(content), dtype=np.uint8)
        if flat.size == 0:
            return np.empty(shape, dtype=dtype)
        return flat.view(dtype).reshape(shape)

    return msgpack.unpackb(
        body, ext_hook=decode, strict_map_key=False, unicode_errors="surrogatepass", max_ext_len=len(body)
    )


def batch_pieces(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in lists that one system call accepts."""
    left = iter(pieces)
    while some := list(islice(left, PIECES_AT_ONCE)):
        yield some


def remaining_pieces(pieces: Sequence[Piece], done: int) -> list[Piece]:
    """Return the rest of consecutive pieces after their first `done` bytes."""
    for place, piece in enumerate(pieces):
        size = len(piece) if isinstance(piece, bytes) else piece.nbytes
        if done < size:
            return [memoryview(piece).cast("B")[done:], *pieces[place + 1 :]]
        done -= size
    return []
