"""This rank's parts of what a checkpoint keeps, out and in.

Invariant: of the ranks that hold the same part exactly one writes it, and they take turns; every rank reads no more
than its own parts, wherever they were cut when they were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from slime.errors import UserError
from slime.train.backends.fsdp.sharding import local_part
from slime.train.backends.fsdp.streamed_adam import MOMENTS, StreamedAdam
from slime.train.backends.protocol import NamedTensor
from slime.train.checkpoints.parts import Part
from slime.train.checkpoints.saved_tensors import SavedTensors

STEP = "step"


Placed = tuple[str, torch.Tensor, torch.Tensor]
"""The name of a tensor, one that lies on the ranks as it does, and this rank's part of it."""


def placed(tensors: Iterable[NamedTensor]) -> Iterator[Placed]:
    """Tensors that are cut as they are."""
    return ((name, tensor, local_part(tensor.detach())) for name, tensor in tensors)


def own_parts(kind: str, tensors: Iterable[Placed], *, rank: int) -> Iterator[Part]:
    """What this rank has to write of some tensors; those that are whole on every rank are written by the first."""
    for turn, (name, like, part) in enumerate(tensors):
        if _writes(like, turn, rank) and (part.numel() or not like.numel()):
            yield Part(kind, name, part, tuple(like.shape), own_offset(like))


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> Iterator[NamedTensor]:
    """Moments and step counts of the parameters that were updated: `{moment}/{parameter}`."""
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter)
        if state:
            yield from ((f"{moment}/{name}", state[moment]) for moment in MOMENTS)
            yield f"{STEP}/{name}", state[STEP].reshape(1)


def read_parts(saved: SavedTensors, tensors: Iterable[Placed]) -> None:
    """Overwrite this rank's parts."""
    for name, like, part in tensors:
        saved.read_into(name, part, own_offset(like))


@torch.no_grad()
def read_optimizer(saved: SavedTensors, optimizer: torch.optim.Optimizer, parameters: Iterable[NamedTensor]) -> None:
    """Put in this rank's parts of the moments of the parameters that have any."""
    for name, parameter in parameters:
        keys = [f"{part}/{name}" for part in (*MOMENTS, STEP)]
        found = [key for key in keys if key in saved]
        if not found:
            continue
        if found != keys:
            raise UserError(f"checkpoint {saved.folder} has half an optimizer state for {name}: it is damaged")
        state = optimizer.state[parameter] = _new_state(optimizer, parameter)
        read_parts(saved, placed((f"{moment}/{name}", state[moment]) for moment in MOMENTS))
        saved.read_into(f"{STEP}/{name}", state[STEP].view(1))


def _new_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Moments where and as the optimizer keeps them."""
    if isinstance(optimizer, StreamedAdam):
        return optimizer.state_of(parameter)
    moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
    return {**moments, STEP: torch.zeros((), device=parameter.device)}


def own_offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where this rank's part of a tensor begins in it."""
    offset, size = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        for dim, (place, count) in _cuts(tensor):
            begin = min(place * -(-size[dim] // count), size[dim])
            size[dim] = min(-(-size[dim] // count), size[dim] - begin)
            offset[dim] += begin
    return tuple(offset)


def _cuts(tensor: DTensor) -> Iterator[tuple[int, tuple[int, int]]]:
    """The dimension that each dimension of the mesh cuts, with this rank's place and the number of pieces."""
    for index, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            yield placement.dim, (tensor.device_mesh.get_local_rank(index), tensor.device_mesh.size(index))


def _writes(tensor: torch.Tensor, turn: int, rank: int) -> bool:
    """Whether it is this rank's turn among those that hold the same part."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    place, count = 0, 1
    for index, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            size = tensor.device_mesh.size(index)
            place, count = place * size + tensor.device_mesh.get_local_rank(index), count * size
    return place == turn % count
