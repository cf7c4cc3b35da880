"""Buckets of exported weights: tensors as in a Hugging Face folder, each bucket whole on one owner rank.

Invariant: a bucket contains exactly the tensors of its planned layout; every tensor is in exactly one bucket.
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
    """Description of an exported tensor, which will be whole on the rank `owner` of the world."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class HfBucket:
    """Exported tensors with one owner; `tensors` by name on the owner, None elsewhere. Callers must not change them."""

    owner: int
    layout: tuple[HfTensor, ...]
    tensors: dict[str, Tensor] | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.layout)

    def broadcast_tensors(self, world: Ranks) -> Iterator[tuple[str, Tensor]]:
        """Broadcast the tensors from the owner and yield them on every rank; all ranks iterate together."""
        for tensor in self.layout:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
            if self.tensors is not None:
                whole.copy_(self.tensors[tensor.name])
            if world.size > 1:
                dist.broadcast(whole, self.owner, group=world.group)
            yield tensor.name, whole


class PreviousExport(Protocol):
    """Tensors of the previous export, from which ranks compute the changes to send and owners rebuild the tensors.

    `given` are this rank's parts, by name and place, on the host; `whole` returns a tensor as its owner exported it.
    """

    given: dict[str, Tensor]

    def whole(self, name: str) -> Tensor | None: ...


def export_dtype(found: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Export dtype of a tensor: the requested one for floating tensors, its own for others."""
    return dtype if found.is_floating_point else found


def plan_bucket_ranges(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Split sizes into consecutive ranges that add up to at most `limit`; a larger single size gets its own range."""
    ranges, start, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > limit:
            ranges.append((start, index))
            start, filled = index, 0
        filled += size
    if start < len(sizes):
        ranges.append((start, len(sizes)))
    return ranges
