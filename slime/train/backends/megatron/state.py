"""This rank's parts of what a checkpoint keeps, out and in, under the names of the model folder.

Invariant: every tensor that is written has the name and the shape it has in the folder, so a checkpoint says nothing of
the layout that wrote it. Of the ranks that hold the same part exactly one writes it, and they take turns; what the
optimizers of several ranks share is put together on one of them, parameter by parameter, before it is cut into parts.
A rank reads its parameters and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from slime.errors import UserError
from slime.models.families.weight_map import Entry
from slime.models.safetensors_io import region_shape
from slime.train.backends.megatron.masters import MOMENTS, Master
from slime.train.backends.megatron.placement import Placement
from slime.train.backends.protocol import NamedTensor
from slime.train.checkpoints.parts import OPTIMIZER, Part
from slime.train.checkpoints.saved_tensors import SavedTensors

STEP = "step"


def weight_parts(kind: str, placement: Placement, tensors: Iterable[NamedTensor]) -> Iterator[Part]:
    """What this rank writes of some weights that all copies of the model have alike."""
    for turn, (name, tensor) in enumerate(tensors):
        entry = placement.entries[name]
        if placement.is_mine_to_write(entry, turn):
            yield from _cut(kind, placement, entry, tensor.detach())


def master_parts(
    kind: str, placement: Placement, masters: Mapping[str, Master], tensors: Iterable[NamedTensor]
) -> Iterator[Part]:
    """The same in float32, from the optimizer's copies of what is trained in another dtype; all ranks together."""
    for turn, (name, tensor) in enumerate(tensors):
        entry, master = placement.entries[name], masters.get(name)
        whole: Tensor | None = tensor.detach()
        if master is not None and tensor.dtype != torch.float32:
            whole = _put_together(placement, entry, master, master.main)
            if not master.is_shared and not placement.is_mine_to_write(entry, turn):
                continue
        elif not placement.is_mine_to_write(entry, turn):
            continue
        if whole is not None:
            yield from _cut(kind, placement, entry, whole)


def optimizer_parts(placement: Placement, masters: Mapping[str, Master]) -> Iterator[Part]:
    """`{moment}/{tensor}` and `step/{tensor}` of what was updated; all ranks together."""
    for turn, (name, master) in enumerate(masters.items()):
        entry, step = placement.entries[name], master.step
        if step is None or (not master.is_shared and not placement.is_mine_to_write(entry, turn)):
            continue
        for moment in MOMENTS:
            whole = _put_together(placement, entry, master, master.state[moment])
            if whole is not None:
                yield from _cut(OPTIMIZER, placement, entry, whole, f"{moment}/")
        if whole is not None:
            yield from (
                Part(OPTIMIZER, f"{STEP}/{entry.hf[share.source]}", step, (1,), (0,))
                for share in placement.own_shard(entry).shares
                if all(part.start == 0 < part.stop for part in share.region)
            )


@torch.no_grad()
def read_weights(
    saved: SavedTensors, placement: Placement, tensors: Iterable[NamedTensor], masters: Mapping[str, Master]
) -> None:
    """Overwrite this rank's parameters, and the optimizer's copies of them."""
    for name, tensor in tensors:
        local, master = _read(saved, placement, placement.entries[name]), masters.get(name)
        tensor.copy_(local)
        own = None if master is None else master.own(placement.rank)
        if master is not None and master.main is not None and own is not None:
            master.main.copy_(local.reshape(-1)[own.begin : own.end].view(master.main.shape))


@torch.no_grad()
def read_optimizer(saved: SavedTensors, placement: Placement, masters: Iterable[tuple[str, Master]]) -> None:
    """Put in this rank's numbers of the moments of the parameters that have any."""
    for name, master in masters:
        entry, own = placement.entries[name], master.own(placement.rank)
        keys = [f"{part}/{one}" for part in (*MOMENTS, STEP) for one in entry.hf]
        found = [key for key in keys if key in saved]
        if not found or own is None:
            continue
        if found != keys:
            raise UserError(f"checkpoint {saved.folder} has half an optimizer state for {entry.hf[0]}: it is damaged")
        moments = {
            moment: _read(saved, placement, entry, f"{moment}/").reshape(-1)[own.begin : own.end] for moment in MOMENTS
        }
        step = torch.zeros(1)
        saved.read_into(f"{STEP}/{entry.hf[0]}", step)
        master.put_state(moments, step.item())


def _cut(kind: str, placement: Placement, entry: Entry, local: Tensor, prefix: str = "") -> Iterator[Part]:
    shard = placement.own_shard(entry)
    for share, part in zip(shard.shares, shard.split(local), strict=True):
        if part.numel():
            name, offset = entry.hf[share.source], tuple(cut.start for cut in share.region)
            yield Part(kind, prefix + name, part, placement.shapes[name], offset)


def _read(saved: SavedTensors, placement: Placement, entry: Entry, prefix: str = "") -> Tensor:
    """This rank's part of a parameter, on the host and in float32."""
    shard, parts = placement.own_shard(entry), []
    for share in shard.shares:
        part = torch.empty(region_shape(share.region))
        if part.numel():
            saved.read_into(prefix + entry.hf[share.source], part, [cut.start for cut in share.region])
        parts.append(part)
    return shard.join(parts)


def _put_together(placement: Placement, entry: Entry, master: Master, own: Tensor | None) -> Tensor | None:
    """The numbers of a parameter that several ranks have, on the one that writes them; None elsewhere."""
    if entry.is_copy or own is None or (master.is_shared and placement.own_shard(entry).is_copy):
        return None
    shape, rank = master.parameter.shape, placement.rank
    if len(master.spans) == 1:
        return own.detach().view(shape)
    if rank != master.writer:
        _finish([dist.P2POp(dist.isend, own.detach().contiguous(), master.writer)])
        return None
    whole = torch.empty(master.parameter.numel(), dtype=own.dtype, device=own.device)
    transfers = []
    for span in master.spans:
        target = whole[span.begin : span.end]
        if span.rank == rank:
            target.copy_(own.detach())
        else:
            transfers.append(dist.P2POp(dist.irecv, target, span.rank))
    _finish(transfers)
    return whole.view(shape)


def _finish(transfers: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
