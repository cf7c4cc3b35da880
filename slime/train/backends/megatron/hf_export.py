"""Weights on their way out: under their names in a model folder, each whole on one rank.

Invariant: every rank comes to the same plan without asking anyone. Of a tensor only its owner ever has the whole, and
the owner holds some of it wherever it may; the others send it their parts, in the dtype in which they leave, as one
message for each bucket, or what changed of them since they were sent before. What is whole at once is one bucket.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from slime.train.backends.hf_buckets import Earlier, HfBucket, HfTensor, cut_buckets
from slime.train.backends.megatron.shard_map import HeldPart, HeldTensor, Placement
from slime.train.topology import Ranks

# Parts of tensors on their way to an owner, whole or as what changed since they were sent before.
#
# Invariant: what an owner makes of a message is bit for bit the part that was sent. A message of changes is never
# longer than one of everything: numbers that changed with their places, or all of them where that is less.

WHOLE = -1
"""In the place of how many numbers changed: all are sent, without their places."""
_PLACE = torch.int32
_LARGEST = torch.iinfo(_PLACE).max
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Message:
    """Bytes of one part; `changed` numbers, or `WHOLE`."""

    changed: int
    pieces: tuple[Tensor, ...]


def whole_message(part: Tensor) -> Message:
    return Message(WHOLE, (_bytes(part),))


def changes_of(part: Tensor, key: str, earlier: Earlier) -> Message:
    """What is to be sent of a part; from now on it is what was sent before."""
    before = earlier.given.get(key)
    if before is None:
        earlier.given[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda).copy_(part)
        return whole_message(part)
    new = _bits(part).view(-1)
    places = (new != _bits(before.to(part.device, non_blocking=True)).view(-1)).nonzero().view(-1)
    if not len(places):
        return Message(0, ())
    before.copy_(part)
    if part.numel() > _LARGEST or message_bytes(len(places), part.numel(), part.itemsize) >= part.nbytes:
        return whole_message(part)
    return Message(len(places), (_bytes(places.to(_PLACE)), _bytes(new[places])))


def message_bytes(changed: int, count: int, width: int) -> int:
    """How long the message of a part of `count` numbers is."""
    return count * width if changed == WHOLE else changed * (_PLACE.itemsize + width)


@dataclass
class Received:
    """What one rank sent of a bucket: messages of its parts, one after the other."""

    raw: Tensor
    changed: list[int]

    def apply_to(self, block: Tensor) -> None:
        """Take the next message, and make the block of its tensor what it is on that rank."""
        changed = self.changed.pop(0)
        if changed == WHOLE:
            block.copy_(self._next(block.nbytes, block.dtype).view(block.shape))
        elif changed:
            places = self._next(changed * _PLACE.itemsize, _PLACE).long()
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
    return tensor.view(_SAME_WIDTH[tensor.element_size()])


@dataclass(frozen=True)
class Load:
    """Tensors that go to one owner together."""

    owner: int
    members: tuple[HeldTensor, ...]
    tensors: tuple[HfTensor, ...]

    def parts(self) -> Iterator[tuple[int, HfTensor, HeldPart, int]]:
        """Number of the tensor, the tensor, a part of it, and who gives that part to the owner."""
        for number, (member, tensor) in enumerate(zip(self.members, self.tensors, strict=True)):
            for part in member.parts:
                yield number, tensor, part, _giver(part, self.owner)


class HfExport:
    """The weights of one model; `weights` are this rank's parameters by their global names."""

    def __init__(self, placement: Placement, world: Ranks, weights: Mapping[str, Tensor]) -> None:
        self._placement = placement
        self._world = world
        self._weights = weights

    def plan(self, dtype: torch.dtype, max_bytes: int, owners: Sequence[int] | None = None) -> list[Load]:
        """Who gets what, in the order of `buckets`. Owners take turns: one puts its bucket away while those of the
        others are gathered."""
        spread = _spread(self._placement.tensors, dtype, owners)
        loads = []
        for owner, own in sorted(spread.items()):
            described = [HfTensor(one.name, one.shape, dtype, owner) for one in own]
            loads.append(
                [
                    Load(owner, tuple(own[begin:end]), tuple(described[begin:end]))
                    for begin, end in cut_buckets([tensor.nbytes for tensor in described], max_bytes)
                ]
            )
        return [load for turn in zip_longest(*loads) for load in turn if load is not None]

    @torch.no_grad()
    def buckets(
        self,
        dtype: torch.dtype,
        max_bytes: int,
        owners: Sequence[int] | None = None,
        earlier: Earlier | None = None,
    ) -> Iterator[HfBucket]:
        """All ranks iterate together; only the owner has a bucket's tensors."""
        if self._world.device.type == "cuda":
            self._world.barrier()  # NCCL wants all of a group in its first operation; of a transfer only two are
        for load in self.plan(dtype, max_bytes, owners):
            if load.owner != self._world.rank:
                self._send(load, earlier)
                yield HfBucket(load.owner, load.tensors, None)
            else:
                yield HfBucket(
                    load.owner, load.tensors, self._put_together(load, self._received(load, earlier), earlier)
                )

    def _send(self, load: Load, earlier: Earlier | None) -> None:
        messages = []
        for _, tensor, part, giver in load.parts():
            if giver == self._world.rank:
                own = self._local(part).to(tensor.dtype).contiguous()
                messages.append(
                    whole_message(own) if earlier is None else changes_of(own, f"{tensor.name} {part.place}", earlier)
                )
        if messages and earlier is not None:
            lengths = torch.tensor([message.changed for message in messages], device=self._world.device)
            _finish([dist.P2POp(dist.isend, lengths, load.owner)])
        raw = [piece for message in messages for piece in message.pieces]
        if raw and sum(map(len, raw)):
            _finish([dist.P2POp(dist.isend, torch.cat(raw), load.owner)])

    def _received(self, load: Load, earlier: Earlier | None) -> dict[int, Received]:
        """What every other rank sent of a bucket."""
        expected: dict[int, list[tuple[int, int]]] = {}
        for _, tensor, part, giver in load.parts():
            if giver != self._world.rank:
                expected.setdefault(giver, []).append((part.count, tensor.dtype.itemsize))
        counts = {giver: torch.full((len(parts),), WHOLE) for giver, parts in expected.items()}
        if earlier is not None:
            counts = {giver: lengths.to(self._world.device) for giver, lengths in counts.items()}
            _finish([dist.P2POp(dist.irecv, lengths, giver) for giver, lengths in counts.items()])
        received = {}
        for giver, parts in expected.items():
            changed = counts[giver].tolist()
            size = sum(message_bytes(one, *part) for one, part in zip(changed, parts, strict=True))
            received[giver] = Received(torch.empty(size, dtype=torch.uint8, device=self._world.device), changed)
        _finish([dist.P2POp(dist.irecv, one.raw, giver) for giver, one in received.items() if len(one.raw)])
        return received

    def _put_together(self, load: Load, received: dict[int, Received], earlier: Earlier | None) -> dict[str, Tensor]:
        wholes: dict[str, Tensor] = {}
        for number, tensor, part, giver in load.parts():
            own = self._local(part).to(tensor.dtype) if giver == self._world.rank else None
            if own is not None and len(load.members[number].parts) == 1 and own.shape == torch.Size(tensor.shape):
                wholes[tensor.name] = own
                continue
            if tensor.name not in wholes:
                wholes[tensor.name] = self._before(tensor, earlier)
            block = wholes[tensor.name][part.region]
            if own is not None:
                block.copy_(own)
            else:
                received[giver].apply_to(block)
        return wholes

    def _before(self, tensor: HfTensor, earlier: Earlier | None) -> Tensor:
        """Memory for a tensor, in which it is as it was when only changes may come."""
        old = None if earlier is None else earlier.whole(tensor.name)
        if old is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._world.device)
        return old.to(self._world.device, copy=True)

    def _local(self, part: HeldPart) -> Tensor:
        """One of this rank's parts."""
        parameter = self._weights[part.entry.megatron].detach()
        return self._placement.own_shard(part.entry).split(parameter)[part.number]


def _finish(transfers: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()


def _giver(part: HeldPart, owner: int) -> int:
    """Who of those that hold a part gives it to the owner: itself, or its nearest neighbour."""
    return min(part.ranks, key=lambda rank: (abs(rank - owner), rank))


def _spread(
    tensors: Sequence[HeldTensor], dtype: torch.dtype, owners: Sequence[int] | None
) -> dict[int, list[HeldTensor]]:
    """About as many bytes for each owner, and each what it holds some of where it can."""
    loads: dict[int, int] = {}
    spread: dict[int, list[HeldTensor]] = {}
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    allowed = None if owners is None else set(owners)
    for tensor in tensors:
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
    return spread
