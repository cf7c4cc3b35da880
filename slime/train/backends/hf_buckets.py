"""Buckets of exported weights: tensors as in a Hugging Face folder, each bucket whole on one owner rank.

Invariant: a bucket contains exactly the tensors of its planned layout; every tensor is in exactly one bucket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Generic, Protocol, TypeVar

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


@dataclass(frozen=True)
class PlannedBucket(Generic[Item]):
    """Items of one exporter for one owner, and the layout of the tensors that are made of them."""

    owner: int
    items: tuple[Item, ...]
    tensors: tuple[HfTensor, ...]


class HfExporter(ABC, Generic[Item]):
    """Exports the weights of one sharded model under their names in a model folder, each whole on its owner alone.

    Invariant: every rank computes the same plan without communication; a rank gathers one bucket at a time. Every
    tensor is in one bucket; one larger than the limit of a bucket gets its own.
    """

    @abstractmethod
    def assign(self, dtype: torch.dtype, owners: Sequence[int] | None) -> dict[int, list[Item]]:
        """Assign items to the owners (default: all ranks), with about equal bytes for each."""

    @abstractmethod
    def layout(self, item: Item, dtype: torch.dtype, owner: int) -> tuple[HfTensor, ...]:
        """The tensors that are made of an item."""

    @abstractmethod
    def gathering(self) -> AbstractContextManager[None]:
        """Prepare the weights for gathers inside the context; all ranks enter together.

        It begins with a collective of all ranks: NCCL needs all of a group in its first operation, a transfer has two.
        """

    @abstractmethod
    def gather(self, bucket: PlannedBucket[Item], earlier: PreviousExport | None) -> dict[str, Tensor] | None:
        """Send this rank's parts of a bucket; on the owner receive all parts and return the tensors."""

    def plan(
        self, dtype: torch.dtype, max_bytes: int, owners: Sequence[int] | None = None
    ) -> list[PlannedBucket[Item]]:
        """Plan the buckets of the world's ranks `owners` (default: all), with floating tensors in `dtype`.

        Owners take turns, so that one consumes its bucket while the others' are gathered.
        """
        loads = []
        for owner, items in self.assign(dtype, owners).items():
            made = [self.layout(item, dtype, owner) for item in items]
            ranges = plan_bucket_ranges([sum(tensor.nbytes for tensor in own) for own in made], max_bytes)
            loads.append(
                [
                    PlannedBucket(owner, tuple(items[begin:end]), tuple(chain.from_iterable(made[begin:end])))
                    for begin, end in ranges
                ]
            )
        return [load for turn in zip_longest(*loads) for load in turn if load is not None]

    @torch.no_grad()
    def buckets(self, plan: Sequence[PlannedBucket[Item]], earlier: PreviousExport | None = None) -> Iterator[HfBucket]:
        """Gather and yield the buckets; all ranks iterate together, to the end, and only the owner has the tensors.

        With `earlier` an exporter may have ranks compare their parts and send only the changes; the buckets are equal.
        """
        with self.gathering():
            for load in plan:
                yield HfBucket(load.owner, load.tensors, self.gather(load, earlier))


def wait_transfers(transfers: list[dist.P2POp]) -> None:
    """Start sends and receives together, and wait for them."""
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
