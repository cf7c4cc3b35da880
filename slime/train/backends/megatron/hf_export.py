"""Export of sharded Megatron weights under their Hugging Face names, each tensor gathered on one owner rank.

Invariant: only the owner of a tensor ever has all of it, and the owner holds a part of it wherever possible. The other
ranks send their parts in the export dtype, as one message for each bucket. With a `PreviousExport` they send only the
numbers that changed since the last export.

Invariant: the owner restores each part from its message bit for bit. A message of changes is never longer than one of
all numbers: it has the changed numbers with their indices, or all numbers where that is shorter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime.train.backends.hf_buckets import HfExporter, HfTensor, PlannedBucket, PreviousExport, wait_transfers
from slime.train.backends.megatron.shard_map import PartitionedTensor, ShardMap, TensorPart
from slime.train.topology import Ranks

Bucket = PlannedBucket[PartitionedTensor]
ALL_CHANGED = -1
"""Value of `changed` in a message that has all numbers of a part, without indices."""
_INDEX_DTYPE = torch.int32
_MAX_INDEX = torch.iinfo(_INDEX_DTYPE).max
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PartMessage:
    """Bytes of one part, which encode `changed` numbers, or all of them (`ALL_CHANGED`)."""

    changed: int
    pieces: tuple[Tensor, ...]


def full_message(part: Tensor) -> PartMessage:
    return PartMessage(ALL_CHANGED, (_bytes(part),))


def delta_message(part: Tensor, key: str, earlier: PreviousExport) -> PartMessage:
    """Encode a part as the difference from the last export, and store it as the base of the next one."""
    before = earlier.given.get(key)
    if before is None:
        earlier.given[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda).copy_(part)
        return full_message(part)
    new = _bits(part).view(-1)
    places = (new != _bits(before.to(part.device, non_blocking=True)).view(-1)).nonzero().view(-1)
    if not len(places):
        return PartMessage(0, ())
    before.copy_(part)
    if part.numel() > _MAX_INDEX or message_bytes(len(places), part.numel(), part.itemsize) >= part.nbytes:
        return full_message(part)
    return PartMessage(len(places), (_bytes(places.to(_INDEX_DTYPE)), _bytes(new[places])))


def message_bytes(changed: int, count: int, width: int) -> int:
    """Size in bytes of the message for a part of `count` numbers of `width` bytes."""
    return count * width if changed == ALL_CHANGED else changed * (_INDEX_DTYPE.itemsize + width)


@dataclass
class ReceivedParts:
    """The concatenated messages that one rank sent for the parts of a bucket."""

    raw: Tensor
    changed: list[int]

    def apply_to(self, block: Tensor) -> None:
        """Consume the next message, and set the block of the tensor to the sender's values."""
        changed = self.changed.pop(0)
        if changed == ALL_CHANGED:
            block.copy_(self._next(block.nbytes, block.dtype).view(block.shape))
        elif changed:
            places = self._next(changed * _INDEX_DTYPE.itemsize, _INDEX_DTYPE).long()
            values = self._next(changed * block.itemsize, block.dtype)
            flat = block.contiguous().view(-1)
            _bits(flat)[places] = _bits(values)
            block.copy_(flat.view(block.shape))

    def _next(self, size: int, dtype: torch.dtype) -> Tensor:
        taken, self.raw = self.raw[:size], self.raw[size:]
        aligned = taken if taken.storage_offset() % dtype.itemsize == 0 else taken.clone()
        return aligned.view(dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGER_DTYPES[tensor.element_size()])


class MegatronHfExport(HfExporter[PartitionedTensor]):
    """Exporter of one model; `weights` returns this rank's current parameters by their global names."""

    def __init__(self, placement: ShardMap, world: Ranks, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        self._placement = placement
        self._world = world
        self._read = weights
        self._weights: Mapping[str, Tensor] = {}

    def assign(self, dtype: torch.dtype, owners: Sequence[int] | None) -> dict[int, list[PartitionedTensor]]:
        """Choose owners that hold a part of their tensors if possible."""
        loads: dict[int, int] = {}
        spread: dict[int, list[PartitionedTensor]] = {}
        heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        allowed = None if owners is None else set(owners)
        for tensor in self._placement.tensors:
            holders = tuple(sorted({rank for part in tensor.parts for rank in part.ranks}))
            if allowed is not None:
                holders = tuple(rank for rank in holders if rank in allowed) or tuple(sorted(allowed))
            heap = heaps.setdefault(holders, [(0, rank) for rank in holders])
            load, owner = heap[0]
            while load < loads.get(owner, 0):
                heapq.heapreplace(heap, (loads[owner], owner))
                load, owner = heap[0]
            loads[owner] = load + torch.Size(tensor.shape).numel() * dtype.itemsize
            heapq.heapreplace(heap, (loads[owner], owner))
            spread.setdefault(owner, []).append(tensor)
        return dict(sorted(spread.items()))

    def layout(self, item: PartitionedTensor, dtype: torch.dtype, owner: int) -> tuple[HfTensor, ...]:
        return (HfTensor(item.name, item.shape, dtype, owner),)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        self._weights = self._read()
        if self._world.device.type == "cuda":
            self._world.barrier()
        yield

    def gather(self, bucket: Bucket, earlier: PreviousExport | None) -> dict[str, Tensor] | None:
        if bucket.owner != self._world.rank:
            self._send(bucket, earlier)
            return None
        return self._assemble(bucket, self._receive_parts(bucket, earlier), earlier)

    def _parts(self, bucket: Bucket) -> Iterator[tuple[PartitionedTensor, HfTensor, TensorPart, int]]:
        """Yield (the item, its tensor, one of its parts, the rank that sends this part to the owner)."""
        for item, tensor in zip(bucket.items, bucket.tensors, strict=True):
            for part in item.parts:  # the owner's own copy if it has one, else that of the nearest rank
                yield item, tensor, part, min(part.ranks, key=lambda rank: (abs(rank - bucket.owner), rank))

    def _send(self, load: Bucket, earlier: PreviousExport | None) -> None:
        messages = []
        for _, tensor, part, giver in self._parts(load):
            if giver == self._world.rank:
                own = self._local(part).to(tensor.dtype).contiguous()
                messages.append(
                    full_message(own) if earlier is None else delta_message(own, f"{tensor.name} {part.place}", earlier)
                )
        if messages and earlier is not None:
            lengths = torch.tensor([message.changed for message in messages], device=self._world.device)
            wait_transfers([dist.P2POp(dist.isend, lengths, load.owner)])
        raw = [piece for message in messages for piece in message.pieces]
        if raw and sum(map(len, raw)):
            wait_transfers([dist.P2POp(dist.isend, torch.cat(raw), load.owner)])

    def _receive_parts(self, load: Bucket, earlier: PreviousExport | None) -> dict[int, ReceivedParts]:
        """Receive the messages of all other ranks for a bucket, by rank."""
        expected: dict[int, list[tuple[int, int]]] = {}
        for _, tensor, part, giver in self._parts(load):
            if giver != self._world.rank:
                expected.setdefault(giver, []).append((part.count, tensor.dtype.itemsize))
        counts = {giver: torch.full((len(parts),), ALL_CHANGED) for giver, parts in expected.items()}
        if earlier is not None:
            counts = {giver: lengths.to(self._world.device) for giver, lengths in counts.items()}
            wait_transfers([dist.P2POp(dist.irecv, lengths, giver) for giver, lengths in counts.items()])
        received = {}
        for giver, parts in expected.items():
            changed = counts[giver].tolist()
            size = sum(message_bytes(one, *part) for one, part in zip(changed, parts, strict=True))
            received[giver] = ReceivedParts(torch.empty(size, dtype=torch.uint8, device=self._world.device), changed)
        wait_transfers([dist.P2POp(dist.irecv, one.raw, giver) for giver, one in received.items() if len(one.raw)])
        return received

    def _assemble(
        self, load: Bucket, received: dict[int, ReceivedParts], earlier: PreviousExport | None
    ) -> dict[str, Tensor]:
        """Assemble the tensors of a bucket from this rank's parts and the received ones."""
        wholes: dict[str, Tensor] = {}
        for item, tensor, part, giver in self._parts(load):
            own = self._local(part).to(tensor.dtype) if giver == self._world.rank else None
            if own is not None and len(item.parts) == 1 and own.shape == torch.Size(tensor.shape):
                wholes[tensor.name] = own
                continue
            if tensor.name not in wholes:  # changes are applied to the values of the last export
                old = None if earlier is None else earlier.whole(tensor.name)
                if old is None:
                    wholes[tensor.name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._world.device)
                else:
                    wholes[tensor.name] = old.to(self._world.device, copy=True)
            block = wholes[tensor.name][part.region]
            if own is not None:
                block.copy_(own)
            else:
                received[giver].apply_to(block)
        return wholes

    def _local(self, part: TensorPart) -> Tensor:
        """Slice one of this rank's parts out of its parameter."""
        parameter = self._weights[part.entry.megatron].detach()
        return self._placement.own_shard(part.entry).split(parameter)[part.number]
