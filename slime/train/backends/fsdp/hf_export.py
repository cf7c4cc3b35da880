"""Exports sharded weights under their names in a model folder, each whole on one rank.

Invariant: every rank computes the same plan without communication. Only a tensor's owner ever has the whole of it; the
others send it the rows they hold, in the export dtype. A rank gathers one bucket at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from slime.models.hf_tensor_plan import ConversionPiece, Convert, plan_pieces
from slime.train.backends.hf_buckets import HfBucket, HfTensor, export_dtype, take_turns, wait_transfers


@dataclass(frozen=True)
class PieceBucket:
    """Pieces that are sent to one owner as one bucket."""

    owner: int
    pieces: tuple[ConversionPiece, ...]

    @property
    def tensors(self) -> tuple[HfTensor, ...]:
        return tuple(
            HfTensor(made.name, made.shape, made.dtype, self.owner) for piece in self.pieces for made in piece.makes
        )


class HfExport:
    """Exports the weights of one sharded model. `value` returns this rank's rows of a parameter to export."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        convert: Convert,
        *,
        rank: int,
        world_size: int,
        value: Callable[[str], Tensor],
    ) -> None:
        self._tensors = tensors
        self._convert = convert
        self._rank = rank
        self._world_size = world_size
        self._value = value
        self._pieces: dict[torch.dtype, list[ConversionPiece]] = {}
        self._cuts: dict[str, RowSharding] = {}

    def plan(self, dtype: torch.dtype, max_bytes: int, owners: Sequence[int] | None = None) -> list[PieceBucket]:
        """Plan the owners' pieces, in the order of `buckets`."""
        if dtype not in self._pieces:
            facts = {name: (tuple(t.shape), export_dtype(t.dtype, dtype)) for name, t in self._tensors.items()}
            self._pieces[dtype] = plan_pieces(facts, self._convert)
        spread = _split_among_owners(self._pieces[dtype], owners or range(self._world_size))
        return [PieceBucket(*load) for load in take_turns(spread, lambda piece: piece.nbytes, max_bytes)]

    @torch.no_grad()
    def buckets(self, dtype: torch.dtype, max_bytes: int, owners: Sequence[int] | None = None) -> Iterator[HfBucket]:
        """Gather and yield the buckets; all ranks iterate together, and only the owner has a bucket's tensors."""
        sharded = next((tensor for tensor in self._tensors.values() if isinstance(tensor, DTensor)), None)
        device = None if sharded is None else sharded.device_mesh.device_type
        if sharded is not None and device == "cuda" and (cut := RowSharding.of(sharded)).size > 1:
            # NCCL needs all ranks of a group in its first operation, and a transfer has only two
            dist.all_reduce(torch.zeros(1, device=device), group=cut.group)
        for load in self.plan(dtype, max_bytes, owners):
            gathered = self._gather_pieces(load)
            yield HfBucket(load.owner, load.tensors, None if gathered is None else self._convert_pieces(load, gathered))

    def _gather_pieces(self, load: PieceBucket) -> list[dict[str, Tensor]] | None:
        """Gather the parameters (or rows) of each piece on the owner; None elsewhere."""
        wholes: list[dict[str, Tensor]] = []
        transfers: list[dist.P2POp] = []
        for piece in load.pieces:
            members: dict[str, Tensor] = {}
            for name in piece.sources:
                whole, more = self._plan_transfers(name, piece, load.owner)
                transfers += more
                if whole is not None:
                    members[name] = whole
            wholes.append(members)
        wait_transfers(transfers)
        return wholes if load.owner == self._rank else None

    def _plan_transfers(self, name: str, piece: ConversionPiece, owner: int) -> tuple[Tensor | None, list[dist.P2POp]]:
        """The owner's tensor of a parameter, complete when the transfers are done, and this rank's transfers."""
        tensor, dtype, is_owner = self._tensors[name], piece.makes[0].dtype, owner == self._rank
        if not isinstance(tensor, DTensor):  # all ranks have it
            return (self._value(name)[slice(*piece.rows) if piece.rows else ...].to(dtype) if is_owner else None), []
        cut = self._cuts.get(name) or self._cuts.setdefault(name, RowSharding.of(tensor))
        if owner not in cut.ranks:  # the ranks of the owner's copy of the model send it
            return None, []
        begin, end = piece.rows or (0, cut.count)
        held = {rank: span for rank in cut.ranks if (span := cut.held(rank, begin, end)) is not None}
        part = None
        if self._rank in held:
            start, (first, last) = cut.begin(self._rank), held[self._rank]
            part = self._value(name)[first - start : last - start].to(dtype).contiguous()
        if not is_owner:
            return None, [] if part is None else [dist.P2POp(dist.isend, part, owner, cut.group)]
        if part is not None and len(held) == 1:
            return part, []
        whole = torch.empty((end - begin, *tensor.shape[1:]), dtype=dtype, device=tensor.device_mesh.device_type)
        transfers = []
        for rank, (first, last) in held.items():
            target = whole[first - begin : last - begin]
            if rank != self._rank:
                transfers.append(dist.P2POp(dist.irecv, target, rank, cut.group))
            elif part is not None:
                target.copy_(part)
        return whole, transfers

    def _convert_pieces(self, load: PieceBucket, gathered: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Convert to the tensors of a model folder.

        Whole parameters are converted together and rows of stacked parameters piece by piece; pieces that are the same
        in the folder are not converted.
        """
        parts = list(zip(load.pieces, gathered, strict=True))
        plain: dict[str, Tensor] = {}
        for piece, members in parts:
            if piece.rows is None and not piece.is_same:
                plain |= members
        converted = self._convert(plain) if plain else {}
        found: dict[str, Tensor] = {}
        for piece, members in parts:
            if piece.is_same:
                found |= members
                continue
            own = converted if piece.rows is None else self._convert(members)
            found |= {made.name: own[made.made_as] for made in piece.makes}
        return found


@dataclass(frozen=True)
class RowSharding:
    """Row sharding of a parameter over a group; `ranks` are numbers in the world, in the order of their rows."""

    count: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup

    @classmethod
    def of(cls, tensor: DTensor) -> RowSharding:
        places = [place for place, how in enumerate(tensor.placements) if isinstance(how, Shard)]
        if len(places) != 1 or tensor.placements[places[0]] != Shard(0):
            raise RuntimeError(f"a parameter is placed as {tensor.placements}, not in rows over one group of ranks")
        group = tensor.device_mesh.get_group(places[0])
        return cls(len(tensor), tuple(dist.get_process_group_ranks(group)), group)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def begin(self, rank: int) -> int:
        """The first row that a rank holds."""
        return min(self.count, self.ranks.index(rank) * -(-self.count // self.size))

    def held(self, rank: int, begin: int, end: int) -> tuple[int, int] | None:
        """Range of the rows `begin` to `end` that a rank holds; None if it holds none of them."""
        first = self.begin(rank)
        last = min(self.count, first + -(-self.count // self.size))
        return (max(first, begin), min(last, end)) if max(first, begin) < min(last, end) else None


def _split_among_owners(pieces: Sequence[ConversionPiece], owners: Sequence[int]) -> dict[int, list[ConversionPiece]]:
    """Assign consecutive pieces to the owners, with about equal bytes for each."""
    total = sum(piece.nbytes for piece in pieces)
    spread: dict[int, list[ConversionPiece]] = {owner: [] for owner in owners}
    before = 0
    for piece in pieces:
        middle = before + piece.nbytes / 2
        spread[owners[min(len(owners) - 1, int(middle * len(owners) / total))]].append(piece)
        before += piece.nbytes
    return spread
