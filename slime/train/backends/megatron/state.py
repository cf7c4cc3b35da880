"""Master copies of parameters, and this rank's parts of a checkpoint under the names of the model folder.

Invariant: if the optimizers of several ranks share a parameter, each has a contiguous range of its flattened numbers,
and all ranks know all ranges. A parameter that is float32 itself is its own master copy.

Invariant: every written tensor has the name and the shape it has in the folder, so a checkpoint is independent of the
layout that wrote it. Of the ranks that hold the same part exactly one writes it, in turns. Parameters that the
optimizers of several ranks share are gathered on one of them, one at a time, before they are split into parts. A rank
reads only its own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from slime.models.families.weight_map import ParameterEntry
from slime.models.safetensors_io import region_shape
from slime.train.backend import MOMENTS, STEP, NamedTensor, has_optimizer_state
from slime.train.backends.hf_buckets import wait_transfers
from slime.train.backends.megatron.shard_map import ShardMap
from slime.train.checkpoints.rank_files import OPTIMIZER, SavedPart
from slime.train.checkpoints.reader import SavedTensors

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer


@dataclass(frozen=True)
class ParamRange:
    """The range [begin, end) of a parameter's flattened numbers that one rank of the world updates."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True)
class MasterParam:
    """The master copy of one trained parameter: the ranges that ranks update, and this rank's numbers."""

    parameter: nn.Parameter
    spans: tuple[ParamRange, ...]
    optimizer: torch.optim.Optimizer
    """The inner optimizer, which computes the update."""
    main: Tensor | None
    """This rank's numbers in float32; None if it has none."""
    is_shared: bool
    """Whether the copies of the model update different ranges of it; else each updates all numbers."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Moments and step; empty before the first update."""
        return {} if self.main is None else self.optimizer.state.get(self.main, {})

    def own(self, rank: int) -> ParamRange | None:
        return next((span for span in self.spans if span.rank == rank), None)

    @property
    def writer(self) -> int:
        """The rank that gathers and writes the whole parameter: the one with the longest range."""
        return max(self.spans, key=lambda span: (span.end - span.begin, -span.rank)).rank

    @property
    def step(self) -> Tensor | None:
        """The number of updates so far; None before the first."""
        found: Tensor | int | None = self.state.get("step")
        if found is None and self.state:
            found = self._group.get("step")
        return None if found is None else torch.as_tensor(found, dtype=torch.float32).reshape(1).cpu()

    @torch.no_grad()
    def put_state(self, moments: Mapping[str, Tensor], step: float) -> None:
        """Overwrite Adam's moments and step of this rank's numbers."""
        if self.main is None:
            return
        state = self.optimizer.state[self.main]
        for name, values in moments.items():
            if name not in state:
                state[name] = torch.zeros_like(self.main, dtype=torch.float32, requires_grad=False)
            state[name].copy_(values.reshape(self.main.shape))
        if isinstance(self.optimizer, torch.optim.Adam):
            state["step"] = torch.tensor(step, dtype=torch.float32)
        else:
            self._group["step"] = int(step)

    @property
    def _group(self) -> dict[str, Any]:
        return next(group for group in self.optimizer.param_groups if any(one is self.main for one in group["params"]))


def find_masters(
    optimizer: ChainedOptimizer, parameters: Mapping[str, nn.Parameter], rank: int
) -> dict[str, MasterParam]:
    """Return the master copies of all trained parameters by global name; `optimizer` is Megatron's for the model."""
    by_parameter = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, MasterParam] = {}
    for one in optimizer.chained_optimizers:
        if one.is_stub_optimizer:
            continue
        for master in (
            _distributed_masters(one)
            if isinstance(one, DistributedOptimizer)
            else _local_masters(one, parameters, rank)
        ):
            if id(master.parameter) in by_parameter:
                found[by_parameter[id(master.parameter)]] = master
    return {name: found[name] for name in parameters if name in found}


def _distributed_masters(optimizer: DistributedOptimizer) -> Iterator[MasterParam]:
    """Yield the parameters of a distributed optimizer, whose ranks split each gradient bucket evenly."""
    for buffer in optimizer.buffers:
        members = dist.get_process_group_ranks(buffer.data_parallel_group)
        for parameter, (begin, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            each = bucket.grad_data.numel() // len(members)
            begin, end = begin - bucket.offset, end - bucket.offset
            spans = tuple(
                ParamRange(members[number], max(begin, number * each) - begin, min(end, (number + 1) * each) - begin)
                for number in range(begin // each, -(-end // each))
            )
            place = optimizer.model_param_group_index_map.get(parameter)
            main = None if place is None else optimizer.optimizer.param_groups[place[0]]["params"][place[1]]
            yield MasterParam(parameter, spans, optimizer.optimizer, main, is_shared=True)


def _local_masters(
    optimizer: MegatronOptimizer, parameters: Mapping[str, nn.Parameter], rank: int
) -> Iterator[MasterParam]:
    """Yield the parameters of an optimizer that updates all of their numbers on this rank."""
    updated = {id(one) for group in optimizer.optimizer.param_groups for one in group["params"]}
    for parameter in parameters.values():
        copy = getattr(parameter, "main_param", None)
        main = parameter if copy is None else copy
        if id(main) in updated:
            whole = (ParamRange(rank, 0, parameter.numel()),)
            yield MasterParam(parameter, whole, optimizer.optimizer, main, is_shared=False)


def weight_parts(
    kind: str, placement: ShardMap, tensors: Iterable[NamedTensor], masters: Mapping[str, MasterParam]
) -> Iterator[SavedPart]:
    """Yield the parts this rank writes of weights that are equal in all copies of the model; all ranks together.

    They are in float32, from the master copies, where weights that have one are in another dtype.
    """
    for turn, (name, tensor) in enumerate(tensors):
        entry, master = placement.entries[name], masters.get(name)
        whole: Tensor | None = tensor.detach()
        if master is not None and tensor.dtype != torch.float32:
            whole = _gather_on_writer(placement, entry, master, master.main)
            if not master.is_shared and not placement.writes_part(entry, turn):
                continue
        elif not placement.writes_part(entry, turn):
            continue
        if whole is not None:
            yield from _parts_of_shard(kind, placement, entry, whole)


def optimizer_parts(placement: ShardMap, masters: Mapping[str, MasterParam]) -> Iterator[SavedPart]:
    """Yield `{moment}/{tensor}` and `step/{tensor}` of all updated parameters; all ranks together."""
    for turn, (name, master) in enumerate(masters.items()):
        entry, step = placement.entries[name], master.step
        if step is None or (not master.is_shared and not placement.writes_part(entry, turn)):
            continue
        for moment in MOMENTS:
            whole = _gather_on_writer(placement, entry, master, master.state[moment])
            if whole is not None:
                yield from _parts_of_shard(OPTIMIZER, placement, entry, whole, f"{moment}/")
        if whole is not None:
            yield from (
                SavedPart(OPTIMIZER, f"{STEP}/{entry.hf[share.source]}", step, (1,), (0,))
                for share in placement.own_shard(entry).shares
                if all(part.start == 0 < part.stop for part in share.region)
            )


@torch.no_grad()
def read_weights(
    saved: SavedTensors, placement: ShardMap, tensors: Iterable[NamedTensor], masters: Mapping[str, MasterParam]
) -> None:
    """Overwrite this rank's parameters and their master copies."""
    for name, tensor in tensors:
        local, master = _read_shard(saved, placement, placement.entries[name]), masters.get(name)
        tensor.copy_(local)
        own = None if master is None else master.own(placement.rank)
        if master is not None and master.main is not None and own is not None:
            master.main.copy_(local.reshape(-1)[own.begin : own.end].view(master.main.shape))


@torch.no_grad()
def read_optimizer(saved: SavedTensors, placement: ShardMap, masters: Iterable[tuple[str, MasterParam]]) -> None:
    """Restore this rank's numbers of the moments, for the parameters that have moments in the checkpoint."""
    for name, master in masters:
        entry, own = placement.entries[name], master.own(placement.rank)
        if own is None or not has_optimizer_state(saved, entry.hf):
            continue
        moments = {
            moment: _read_shard(saved, placement, entry, f"{moment}/").reshape(-1)[own.begin : own.end]
            for moment in MOMENTS
        }
        step = torch.zeros(1)
        saved.read_into(f"{STEP}/{entry.hf[0]}", step)
        master.put_state(moments, step.item())


def _parts_of_shard(
    kind: str, placement: ShardMap, entry: ParameterEntry, local: Tensor, prefix: str = ""
) -> Iterator[SavedPart]:
    shard = placement.own_shard(entry)
    for share, part in zip(shard.shares, shard.split(local), strict=True):
        if part.numel():
            name, offset = entry.hf[share.source], tuple(cut.start for cut in share.region)
            yield SavedPart(kind, prefix + name, part, placement.shapes[name], offset)


def _read_shard(saved: SavedTensors, placement: ShardMap, entry: ParameterEntry, prefix: str = "") -> Tensor:
    """Read this rank's part of a parameter, on the host and in float32."""
    shard, parts = placement.own_shard(entry), []
    for share in shard.shares:
        part = torch.empty(region_shape(share.region))
        if part.numel():
            saved.read_into(prefix + entry.hf[share.source], part, [cut.start for cut in share.region])
        parts.append(part)
    return shard.join(parts)


def _gather_on_writer(
    placement: ShardMap, entry: ParameterEntry, master: MasterParam, own: Tensor | None
) -> Tensor | None:
    """Gather the whole parameter on the rank that writes it; returns None on other ranks."""
    if entry.is_copy or own is None or (master.is_shared and placement.own_shard(entry).is_copy):
        return None
    shape, rank = master.parameter.shape, placement.rank
    if len(master.spans) == 1:
        return own.detach().view(shape)
    if rank != master.writer:
        wait_transfers([dist.P2POp(dist.isend, own.detach().contiguous(), master.writer)])
        return None
    whole = torch.empty(master.parameter.numel(), dtype=own.dtype, device=own.device)
    transfers = []
    for span in master.spans:
        target = whole[span.begin : span.end]
        if span.rank == rank:
            target.copy_(own.detach())
        else:
            transfers.append(dist.P2POp(dist.irecv, target, span.rank))
    wait_transfers(transfers)
    return whole.view(shape)
