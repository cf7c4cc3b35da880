"""Lossless byte deltas of tensors: the change between two versions of a tensor, as a small compressed blob.

The blob of a tensor covers all of its bytes (little endian, C order) and is one zstd frame around

    xor:        new ^ old, byte for byte
    overwrite:  count (u32), count byte positions (u32, ascending), count new byte values
    sparse:     count (u64), new ^ old of count bytes, and the distance of each from its predecessor (the first from
                byte 0): a byte of 255 for every 255, then one of 0 to 254

Invariant: `Blob.apply` either changes the whole target and returns the blob that undoes it, or raises `BadBlob` and
does not change the target.

A GPU computes the checksum sum64 as fast as it reads memory, so the tensors of a delta need not leave the GPU. The
bytes of a tensor, padded with zeros to a multiple of eight, are little-endian words w[0], w[1], ... of 64 bits. With
all arithmetic modulo 2**64 and a logical `>>`,

    x = w[i] + (i + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93

and the checksum is the sum of all x, in sixteen hexadecimal digits. Each step from w[i] to x is invertible, so a change
of one word is always detected; any other change is missed with probability 2**-64. It does not protect against
deliberate manipulation.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray

from slime.errors import UserError

_STEP, _MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_CHUNK = 1 << 22  # words on a GPU; a few temporary copies have this size
_HOST_CHUNK = 1 << 15  # words on the host; fits into a core's cache
_LOW = (1 << 32) - 1


def sum64_of_bytes(data: NDArray[np.uint8]) -> str:
    """The sum64 checksum of bytes on the host."""
    total, whole = 0, data.nbytes // 8 * 8
    tail = np.zeros(8, np.uint8)
    tail[: data.nbytes - whole] = data[whole:]
    words, last = data[:whole].view("<u8"), tail.view("<u8")
    for begin in range(0, len(words), _HOST_CHUNK):
        total += _mixed_sum(words[begin : begin + _HOST_CHUNK], begin)
    if data.nbytes > whole:
        total += _mixed_sum(last, len(words))
    return _hexadecimal(total)


def sum64_of_tensors(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The sum64 checksums of tensors, computed on their device; all sums are copied to the host in one transfer."""
    if not tensors:
        return []
    return [_hexadecimal(value) for value in torch.stack([_sum(tensor) for tensor in tensors]).tolist()]


def _mixed_sum(words: NDArray[np.uint64], first: int) -> int:
    mixed = np.arange(first + 1, first + 1 + len(words), dtype=np.uint64)
    mixed *= np.uint64(_STEP)
    mixed += words
    for _ in range(2):
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(_MIX)
    return int(mixed.sum(dtype=np.uint64))


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.data_ptr() % 8:
        padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
        padded[: flat.numel()] = flat
        flat = padded
    words = flat.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin in range(0, words.numel(), _CHUNK):
        chunk = words[begin : begin + _CHUNK]
        mixed = torch.arange(begin + 1, begin + 1 + chunk.numel(), device=words.device)
        mixed.mul_(_signed(_STEP)).add_(chunk)
        for _ in range(2):
            mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW)).mul_(_signed(_MIX))
        total += mixed.sum()
    return total


def _signed(value: int) -> int:
    """The same 64 bits as a signed integer, for torch."""
    return value - (1 << 64) if value >> 63 else value


def _hexadecimal(total: int) -> str:
    return f"{total % (1 << 64):016x}"


ByteArray = NDArray[np.uint8]

ZSTD_LEVEL = 1
_WORD = 8
_MAX_POSITION = 2**32 - 1
_MAX_GAP = 255


class BadBlob(ValueError):
    """A blob that does not fit the tensor, or data that is not a blob."""


@dataclass(frozen=True)
class TensorDiff:
    """The changed bytes of a tensor of `size` bytes: positions in ascending order, new ^ old, and the new values."""

    size: int
    positions: NDArray[np.int64]
    xors: ByteArray
    values: ByteArray
    difference: ByteArray | None = None
    """new ^ old of all bytes, if it was computed."""

    @classmethod
    def between(cls, old: ByteArray, new: ByteArray) -> TensorDiff:
        difference = old ^ new
        positions = changed_positions(difference)
        return cls(len(new), positions, difference[positions], new[positions], difference)


@dataclass(frozen=True)
class ByteChanges:
    """Decoded changes of a blob: `values` are xored into the bytes at `positions`, or replace them."""

    positions: NDArray[np.int64]
    values: ByteArray
    is_xor: bool


@dataclass(frozen=True)
class Blob:
    """The change of one tensor; `encoding` is one of `ENCODINGS`."""

    data: bytes
    encoding: str

    def apply(self, target: ByteArray) -> Blob:
        """Turn the old bytes into the new ones in place; returns the blob that undoes the change."""
        if self.encoding == "xor":
            np.bitwise_xor(target, self._difference(len(target)), out=target)
            return self
        flips = self.byte_changes(len(target))
        if flips.is_xor:
            target[flips.positions] ^= flips.values
            return self
        undo = Blob(_compress(_pack(flips.positions, target[flips.positions])), self.encoding)
        target[flips.positions] = flips.values
        return undo

    def byte_changes(self, size: int) -> ByteChanges:
        """Decode the changed bytes of a tensor of `size` bytes."""
        if self.encoding == "xor":
            difference = self._difference(size)
            positions = changed_positions(difference)
            return ByteChanges(positions, difference[positions], is_xor=True)
        if self.encoding == "overwrite":
            return ByteChanges(*_unpack(self._decompress(4 + 5 * size), size), is_xor=False)
        return ByteChanges(*_unpack_gaps(self._decompress(16 + 3 * size), size), is_xor=True)

    def _difference(self, size: int) -> ByteArray:
        change = np.frombuffer(self._decompress(size), np.uint8)
        if len(change) != size:
            raise BadBlob(f"covers {len(change)} bytes of a tensor of {size}")
        return change

    def _decompress(self, limit: int) -> bytes:
        try:
            size = zstandard.get_frame_parameters(self.data).content_size
            if size > limit:
                raise BadBlob(f"unpacks to {size} bytes, more than the {limit} that the tensor allows")
            return zstandard.ZstdDecompressor().decompress(self.data, max_output_size=limit)
        except zstandard.ZstdError as cause:
            raise BadBlob(f"is not a zstd frame: {cause}") from cause


def encode(changes: TensorDiff, encoding: str) -> Blob:
    if encoding == "xor":
        difference = changes.difference
        if difference is None:
            difference = np.zeros(changes.size, np.uint8)
            difference[changes.positions] = changes.xors
        return Blob(_compress(difference.data), encoding)
    if encoding == "sparse":
        return Blob(_compress(_pack_gaps(changes.positions, changes.xors)), encoding)
    if changes.size > _MAX_POSITION:
        raise UserError(
            f"a tensor of {changes.size} bytes is too large for 32-bit positions: use --update-weight-delta-encoding "
            "sparse or xor"
        )
    return Blob(_compress(_pack(changes.positions, changes.values)), encoding)


def changed_positions(difference: ByteArray) -> NDArray[np.int64]:
    """The positions at which `difference` is not zero, ascending; scans whole words first, since few bytes change."""
    whole = len(difference) // _WORD * _WORD
    words = np.flatnonzero(difference[:whole].view(np.uint64)) * _WORD
    near = (words[:, None] + np.arange(_WORD)).reshape(-1)
    tail = whole + np.flatnonzero(difference[whole:])
    return np.concatenate([near[difference[near] != 0], tail])


def checksum_function(kind: str) -> Callable[[ByteArray], str]:
    """The function from bytes to a hexadecimal checksum, for one of the choices of --update-weight-delta-checksum."""
    if kind == "xxh3-128":
        return lambda data: xxhash.xxh3_128_hexdigest(data.data)
    if kind == "sum64":
        return sum64_of_bytes
    if kind == "adler32":
        return lambda data: f"{zlib.adler32(data.data):08x}"
    if kind != "blake3":
        raise UserError(f"checksum {kind!r} is not known: use xxh3-128, sum64, blake3 or adler32")
    try:
        from blake3 import blake3
    except ImportError as cause:
        raise UserError(
            "--update-weight-delta-checksum blake3 needs the package blake3: pip install blake3, or use xxh3-128"
        ) from cause
    return lambda data: str(blake3(data.data).hexdigest())


def _compress(data: memoryview | bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)


def _pack(positions: NDArray[np.int64], values: ByteArray) -> bytes:
    return np.uint32(len(positions)).astype("<u4").tobytes() + positions.astype("<u4").tobytes() + values.tobytes()


def _unpack(payload: bytes, length: int) -> tuple[NDArray[np.int64], ByteArray]:
    count = int(np.frombuffer(payload, "<u4", 1)[0]) if len(payload) >= 4 else -1
    if len(payload) != 4 + 5 * count:
        raise BadBlob(f"has {len(payload)} bytes, which is not a list of positions and values")
    positions = np.frombuffer(payload, "<u4", count, offset=4).astype(np.int64)
    if count and int(positions.max()) >= length:
        raise BadBlob(f"names byte {int(positions.max())} of a tensor of {length}")
    return positions, np.frombuffer(payload, np.uint8, count, offset=4 + 4 * count)


def _pack_gaps(positions: NDArray[np.int64], xors: ByteArray) -> bytes:
    gaps = np.diff(positions, prepend=0)
    ends = np.cumsum(gaps // _MAX_GAP + 1) - 1
    steps = np.full(int(ends[-1]) + 1 if len(ends) else 0, _MAX_GAP, np.uint8)
    steps[ends] = gaps % _MAX_GAP
    return np.uint64(len(positions)).astype("<u8").tobytes() + xors.tobytes() + steps.tobytes()


def _unpack_gaps(payload: bytes, length: int) -> tuple[NDArray[np.int64], ByteArray]:
    count = int(np.frombuffer(payload, "<u8", 1)[0]) if len(payload) >= 8 else -1
    if not 0 <= count <= len(payload) - 8:
        raise BadBlob(f"has {len(payload)} bytes, which is not a list of changes")
    steps = np.frombuffer(payload, np.uint8, offset=8 + count)
    is_end = steps != _MAX_GAP
    positions = np.cumsum(steps, dtype=np.int64)[is_end]
    if len(positions) != count or (len(steps) and not is_end[-1]):
        raise BadBlob(f"names {len(positions)} positions for {count} changes")
    if count and int(positions[-1]) >= length:
        raise BadBlob(f"names byte {int(positions[-1])} of a tensor of {length}")
    return positions, np.frombuffer(payload, np.uint8, count, offset=8)
