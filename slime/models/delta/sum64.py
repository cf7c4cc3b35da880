"""A checksum that a GPU computes as fast as it reads: for deltas, whose tensors never leave it whole.

The bytes of a tensor, with zeros behind them up to a multiple of eight, are little-endian words w[0], w[1], ... of 64
bits. With all arithmetic modulo 2**64 and `>>` bringing in zeros,

    x = w[i] + (i + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93

and the checksum is the sum of all x, in sixteen hexadecimal digits. Each step from w[i] to x can be undone, so a change
of one word is always seen; any other goes unseen once in 2**64. It is no defence against somebody who means harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_STEP, _MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_CHUNK = 1 << 22  # words, of which a few copies are made at a time
_HOST_CHUNK = 1 << 15  # what a core's cache holds
_LOW = (1 << 32) - 1


def sum64_of_bytes(data: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    """Of bytes on the host."""
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
    """Of tensors, on the device they are on; the sums of all come to the host together."""
    if not tensors:
        return []
    return [_hexadecimal(value) for value in torch.stack([_sum(tensor) for tensor in tensors]).tolist()]


def _mixed_sum(words: np.ndarray[Any, np.dtype[np.uint64]], first: int) -> int:
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
    """The same 64 bits as torch's integers have them, which know a sign."""
    return value - (1 << 64) if value >> 63 else value


def _hexadecimal(total: int) -> str:
    return f"{total % (1 << 64):016x}"
