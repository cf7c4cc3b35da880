"""Exports sharded weights under their names in a model folder, each whole on one rank.

Invariant: only a tensor's owner ever has the whole of it; the others send it the rows they hold, in the export dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from slime.models.hf_tensor_plan import ConversionPiece, Convert, plan_pieces
from slime.train.backends.fsdp.sharding import part_on_device
from slime.train.backends.hf_buckets import (
    HfExporter,
    HfTensor,
    PlannedBucket,
    PreviousExport,
    export_dtype,
    wait_transfers,
)


class MergedRows(Protocol):
    """An adapter that is merged into the rows that a rank exports, inside the context `gathered`."""

    def gathered(self) -> AbstractContextManager[None]: ...

    def merged(self, name: str, rows: Tensor) -> Tensor: ...


class HfExport(HfExporter[ConversionPiece]):
    """Exporter of a model whose parameters are sharded in rows; an `adapter` is merged into the rows.

    Ranks always send all of their rows: shards are small here, and owners compare the tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        convert: Convert,
        *,
        rank: int,
        world_size: int,
        adapter: MergedRows | None = None,
    ) -> None:
        self._tensors = tensors
        self._convert = convert
        self._rank = rank
        self._world_size = world_size
        self._adapter = adapter
        self._pieces: dict[torch.dtype, list[ConversionPiece]] = {}
        self._cuts: dict[str, RowSharding] = {}

    def assign(self, dtype: torch.dtype, owners: Sequence[int] | None) -> dict[int, list[ConversionPiece]]:
        if dtype not in self._pieces:
            facts = {name: (tuple(t.shape), export_dtype(t.dtype, dtype)) for name, t in self._tensors.items()}
            self._pieces[dtype] = plan_pieces(facts, self._convert)
        pieces, ranks = self._pieces[dtype], owners or range(self._world_size)
        spread: dict[int, list[ConversionPiece]] = {owner: [] for owner in ranks}
        total, before = sum(piece.nbytes for piece in pieces), 0
        for piece in pieces:  # consecutive pieces have one owner
            middle = before + piece.nbytes / 2
            spread[ranks[min(len(ranks) - 1, int(middle * len(ranks) / total))]].append(piece)
            before += piece.nbytes
        return spread

    def layout(self, item: ConversionPiece, dtype: torch.dtype, owner: int) -> tuple[HfTensor, ...]:
        return tuple(HfTensor(made.name, made.shape, made.dtype, owner) for made in item.makes)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        with nullcontext() if self._adapter is None else self._adapter.gathered():
            sharded = next((tensor for tensor in self._tensors.values() if isinstance(tensor, DTensor)), None)
            device = None if sharded is None else sharded.device_mesh.device_type
            if sharded is not None and device == "cuda" and (cut := RowSharding.of(sharded)).size > 1:
                dist.all_reduce(torch.zeros(1, device=device), group=cut.group)
            yield

    def gather(
        self, bucket: PlannedBucket[ConversionPiece], earlier: PreviousExport | None
    ) -> dict[str, Tensor] | None:
        """Gather the parameters (or rows) of each piece on the owner, and convert them to tensors of a model folder.

        Whole parameters are converted together and rows of stacked parameters piece by piece; pieces that are the same
        in the folder are not converted.
        """
        wholes: list[dict[str, Tensor]] = []
        transfers: list[dist.P2POp] = []
        for piece in bucket.items:
            members: dict[str, Tensor] = {}
            for name in piece.sources:
                whole, more = self._plan_transfers(name, piece, bucket.owner)
                transfers += more
                if whole is not None:
                    members[name] = whole
            wholes.append(members)
        wait_transfers(transfers)
        if bucket.owner != self._rank:
            return None
        parts = list(zip(bucket.items, wholes, strict=True))
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

    def _plan_transfers(self, name: str, piece: ConversionPiece, owner: int) -> tuple[Tensor | None, list[dist.P2POp]]:
        """The owner's tensor of a parameter, complete when the transfers are done, and this rank's transfers."""
        tensor, dtype, is_owner = self._tensors[name], piece.makes[0].dtype, owner == self._rank
        if not isinstance(tensor, DTensor):  # all ranks have it
            return (self._rows(name)[slice(*piece.rows) if piece.rows else ...].to(dtype) if is_owner else None), []
        cut = self._cuts.get(name) or self._cuts.setdefault(name, RowSharding.of(tensor))
        if owner not in cut.ranks:  # the ranks of the owner's copy of the model send it
            return None, []
        begin, end = piece.rows or (0, cut.count)
        held = {rank: span for rank in cut.ranks if (span := cut.held(rank, begin, end)) is not None}
        part = None
        if self._rank in held:
            start, (first, last) = cut.begin(self._rank), held[self._rank]
            part = self._rows(name)[first - start : last - start].to(dtype).contiguous()
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

    def _rows(self, name: str) -> Tensor:
        rows = part_on_device(self._tensors[name].detach())
        return rows if self._adapter is None else self._adapter.merged(name, rows)


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
