"""This rank's parts of a checkpoint of a sharded model and its optimizer.

Invariant: of the ranks that hold the same part exactly one writes it, and they take turns; every rank reads only its
own parts, also if the sharding was another when they were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate

from slime.train.backend import MOMENTS, STEP, NamedTensor, has_optimizer_state
from slime.train.backends.fsdp.optimizer import StreamedAdam
from slime.train.backends.fsdp.sharding import local_part, local_region
from slime.train.checkpoints.rank_files import SavedPart
from slime.train.checkpoints.reader import SavedTensors

LocalPart = tuple[str, torch.Tensor, torch.Tensor]
"""(name of a tensor, a tensor that is sharded like it, this rank's part of it)."""


def with_local_parts(tensors: Iterable[NamedTensor]) -> Iterator[LocalPart]:
    """Pair tensors with this rank's parts of them."""
    return ((name, tensor, local_part(tensor.detach())) for name, tensor in tensors)


def parts_to_write(kind: str, tensors: Iterable[LocalPart], *, rank: int) -> Iterator[SavedPart]:
    """Yield the parts that this rank has to write; rank 0 writes tensors that are whole on every rank."""
    for turn, (name, like, part) in enumerate(tensors):
        writes, place, count = rank == 0, 0, 1
        if isinstance(like, DTensor):  # the ranks that hold the same part take turns
            for index, placement in enumerate(like.placements):
                if isinstance(placement, Replicate):
                    size = like.device_mesh.size(index)
                    place, count = place * size + like.device_mesh.get_local_rank(index), count * size
            writes = place == turn % count
        if writes and (part.numel() or not like.numel()):
            yield SavedPart(kind, name, part, tuple(like.shape), local_offset(like))


def local_offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Offset of this rank's part within the whole tensor, for each dimension."""
    return tuple(cut.start for cut in local_region(tensor))


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> Iterator[NamedTensor]:
    """Yield moments and step counts of the parameters that were updated, as `{moment}/{parameter}`."""
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter)
        if state:
            yield from ((f"{moment}/{name}", state[moment]) for moment in MOMENTS)
            yield f"{STEP}/{name}", state[STEP].reshape(1)


def read_parts(saved: SavedTensors, tensors: Iterable[LocalPart]) -> None:
    """Overwrite this rank's parts of the tensors from a checkpoint."""
    for name, like, part in tensors:
        saved.read_into(name, part, local_offset(like))


@torch.no_grad()
def read_optimizer(saved: SavedTensors, optimizer: torch.optim.Optimizer, parameters: Iterable[NamedTensor]) -> None:
    """Load this rank's parts of the moments, for the parameters that have moments in the checkpoint."""
    for name, parameter in parameters:
        if not has_optimizer_state(saved, [name]):
            continue
        if isinstance(optimizer, StreamedAdam):  # which decides where and in which dtype moments are
            state = optimizer.state_of(parameter)
        else:
            state = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
            state[STEP] = torch.zeros((), device=parameter.device)
        optimizer.state[parameter] = state
        read_parts(saved, with_local_parts((f"{moment}/{name}", state[moment]) for moment in MOMENTS))
        saved.read_into(f"{STEP}/{name}", state[STEP].view(1))
