"""Weights that leave a backend: tensors as in a Hugging Face folder, in buckets that each have one owner.

Invariant: what is said of a bucket before anything is gathered is what is in it; every tensor is in exactly one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slime.train.topology import Ranks


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

    def on_all_ranks(self, world: Ranks) -> Iterator[tuple[str, Tensor]]:
        """Its tensors on every rank; all of them iterate together."""
        for tensor in self.layout:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
            if self.tensors is not None:
                whole.copy_(self.tensors[tensor.name])
            if world.size > 1:
                dist.broadcast(whole, self.owner, group=world.group)
            yield tensor.name, whole


class Earlier(Protocol):
    """What left the last time: `given` are this rank's parts, by name and place, on the host; `whole` is what became of
    a tensor on its owner. With it ranks give what changed since, and owners come to the same tensors."""

    given: dict[str, Tensor]

    def whole(self, name: str) -> Tensor | None: ...


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
