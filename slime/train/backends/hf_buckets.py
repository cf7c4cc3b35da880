"""Buckets of exported weights: tensors as in a Hugging Face folder, each bucket whole on one owner rank.

Invariant: a bucket contains exactly the tensors of its planned layout; every tensor is in exactly one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slime.train.topology import Ranks

Item = TypeVar("Item")


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


def take_turns(
    spread: Mapping[int, Sequence[Item]], nbytes: Callable[[Item], int], max_bytes: int
) -> list[tuple[int, tuple[Item, ...]]]:
    """Split the items of each owner into buckets (owner, items).

    Owners take turns, so that one consumes its bucket while the buckets of the others are gathered.
    """
    loads = []
    for owner, own in spread.items():
        ranges = plan_bucket_ranges([nbytes(item) for item in own], max_bytes)
        loads.append([(owner, tuple(own[begin:end])) for begin, end in ranges])
    return [load for turn in zip_longest(*loads) for load in turn if load is not None]


def wait_transfers(transfers: list[dist.P2POp]) -> None:
    """Start sends and receives together, and wait for them."""
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
