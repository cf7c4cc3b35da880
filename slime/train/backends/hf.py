"""Weights that leave a backend: tensors as in a Hugging Face folder, in buckets that each have one owner.

Invariant: what is said of a bucket before anything is gathered is what is in it; every tensor is in exactly one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HfTensor:
    """A tensor that is going to be whole on the rank `owner` of the world."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class HfBucket:
    """Some of them; `tensors` by name on the owner, None elsewhere. They are read, and not changed."""

    owner: int
    layout: tuple[HfTensor, ...]
    tensors: dict[str, Tensor] | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.layout)


def leaving_dtype(found: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Floating tensors leave in the dtype that was asked for, others in their own."""
    return dtype if found.is_floating_point else found


def cut_buckets(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Consecutive ranges whose sizes add up to at most `limit`; a larger single one gets a range of its own."""
    ranges, start, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > limit:
            ranges.append((start, index))
            start, filled = index, 0
        filled += size
    if start < len(sizes):
        ranges.append((start, len(sizes)))
    return ranges
