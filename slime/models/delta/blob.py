"""Lossless byte deltas of tensors: what changed between two versions of a tensor, as a small compressed blob.

The blob of a tensor covers all of its bytes (little endian, C order) and is one zstd frame around

    xor:        new ^ old, byte for byte
    overwrite:  count (u32), count byte positions (u32, ascending), count new byte values

Invariant: `Blob.apply` either changes the whole target and returns the blob that undoes it, or raises `BadBlob` and
leaves the target as it was.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard

from slime.errors import UserError

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

LEVEL = 1
_WORD = 8
_MAX_POSITION = 2**32 - 1


class BadBlob(ValueError):
    """A blob that does not fit the tensor, or no blob at all."""


@dataclass(frozen=True)
class Blob:
    """The change of one tensor; `encoding` is `xor` or `overwrite`."""

    data: bytes
    encoding: str

    def apply(self, target: ByteArray) -> Blob:
        """Turn the old bytes into the new ones in place; the blob that turns them back."""
        if self.encoding == "xor":
            change = np.frombuffer(self._decompress(len(target)), np.uint8)
            if len(change) != len(target):
                raise BadBlob(f"covers {len(change)} bytes of a tensor of {len(target)}")
            np.bitwise_xor(target, change, out=target)
            return self
        positions, values = _unpack(self._decompress(4 + 5 * len(target)), len(target))
        undo = Blob(_compress(_pack(positions, target[positions])), self.encoding)
        target[positions] = values
        return undo

    def _decompress(self, limit: int) -> bytes:
        try:
            size = zstandard.get_frame_parameters(self.data).content_size
            if size > limit:
                raise BadBlob(f"unpacks to {size} bytes, more than the {limit} that the tensor allows")
            return zstandard.ZstdDecompressor().decompress(self.data, max_output_size=limit)
        except zstandard.ZstdError as cause:
            raise BadBlob(f"is not a zstd frame: {cause}") from cause


def encode(difference: ByteArray, new: ByteArray, encoding: str) -> Blob:
    """The blob of a tensor from `new ^ old` and its new bytes."""
    if encoding == "xor":
        return Blob(_compress(difference.data), encoding)
    if len(new) > _MAX_POSITION:
        raise UserError(
            f"a tensor of {len(new)} bytes is too large for 32-bit positions: use --update-weight-delta-encoding xor"
        )
    positions = changed_positions(difference)
    return Blob(_compress(_pack(positions, new[positions])), encoding)


def changed_positions(difference: ByteArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where `difference` is not zero, ascending; looks at whole words first, since few bytes change."""
    whole = len(difference) // _WORD * _WORD
    words = np.flatnonzero(difference[:whole].view(np.uint64)) * _WORD
    near = (words[:, None] + np.arange(_WORD)).reshape(-1)
    tail = whole + np.flatnonzero(difference[whole:])
    return np.concatenate([near[difference[near] != 0], tail])


def checksum_function(kind: str) -> Callable[[ByteArray], str]:
    """From bytes to a hexadecimal checksum, for one of the choices of --update-weight-delta-checksum."""
    if kind == "xxh3-128":
        return lambda data: xxhash.xxh3_128_hexdigest(data.data)
    if kind == "adler32":
        return lambda data: f"{zlib.adler32(data.data):08x}"
    if kind != "blake3":
        raise UserError(f"checksum {kind!r} is not known: use xxh3-128, blake3 or adler32")
    try:
        from blake3 import blake3
    except ImportError as cause:
        raise UserError(
            "--update-weight-delta-checksum blake3 needs the package blake3: pip install blake3, or use xxh3-128"
        ) from cause
    return lambda data: str(blake3(data.data).hexdigest())


def _compress(data: memoryview | bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def _pack(positions: np.ndarray[Any, Any], values: ByteArray) -> bytes:
    return np.uint32(len(positions)).astype("<u4").tobytes() + positions.astype("<u4").tobytes() + values.tobytes()


def _unpack(payload: bytes, length: int) -> tuple[np.ndarray[Any, Any], ByteArray]:
    count = int(np.frombuffer(payload, "<u4", 1)[0]) if len(payload) >= 4 else -1
    if len(payload) != 4 + 5 * count:
        raise BadBlob(f"has {len(payload)} bytes, which is no list of positions and values")
    positions = np.frombuffer(payload, "<u4", count, offset=4).astype(np.int64)
    if count and int(positions.max()) >= length:
        raise BadBlob(f"names byte {int(positions.max())} of a tensor of {length}")
    return positions, np.frombuffer(payload, np.uint8, count, offset=4 + 4 * count)
