"""Writing and reading of this rank's parts of a checkpoint under the names of the model folder.

Invariant: every written tensor has the name and the shape it has in the folder, so a checkpoint is independent of the
layout that wrote it. Of the ranks that hold the same part exactly one writes it, in turns. Parameters that the
optimizers of several ranks share are gathered on one of them, one at a time, before they are split into parts. A rank
reads only its own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from slime.models.families.weight_map import ParameterEntry
from slime.models.safetensors_io import region_shape
from slime.train.backend import MOMENTS, STEP, NamedTensor, has_optimizer_state
from slime.train.backends.hf_buckets import wait_transfers
from slime.train.backends.megatron.fp32_params import MasterParam
from slime.train.backends.megatron.shard_map import ShardMap
from slime.train.checkpoints.rank_files import OPTIMIZER, SavedPart
from slime.train.checkpoints.reader import SavedTensors


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
