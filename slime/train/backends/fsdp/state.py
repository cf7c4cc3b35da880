"""This rank's parts of what a checkpoint keeps, out and in.

Invariant: of the ranks that hold the same part exactly one writes it, and they take turns; every rank reads no more
than its own parts, wherever they were cut when they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from slime.config.initial_weights import Start
from slime.errors import UserError
from slime.train.backends.fsdp.fused.layer import check_float8, fuse_layers
from slime.train.backends.fsdp.optimizer import MOMENTS, StreamedAdam
from slime.train.backends.fsdp.packed_model import PackedModel, PolicyModel
from slime.train.backends.fsdp.sharding import local_part, reshard, shard, whole
from slime.train.backends.protocol import NamedTensor, Resident
from slime.train.checkpoints.rank_files import Part
from slime.train.checkpoints.reader import SavedTensors
from slime.train.timers import Progress

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


# Weights that are not trained, by name: reference, teacher, and those the engines sample with.
#
# Invariant: a set of the policy's shape is sharded as the policy is, so copying the policy into it moves nothing
# between ranks. A set on the device has a module of its own; those on the host share one, which is on the device.


class FrozenModel:
    """A model in the compute dtype."""

    def __init__(
        self, module: PolicyModel, mesh: DeviceMesh, progress: Progress, *, on_host: bool, in_float8: bool
    ) -> None:
        self.module = module
        module.requires_grad_(False)
        if in_float8:
            check_float8(module.model, module.model.dtype, torch.device(mesh.device_type))
        if mesh.device_type == "cuda":
            fuse_layers(module.model, in_float8=in_float8)
        shard(module, mesh, MixedPrecisionPolicy(), progress, on_host=on_host)
        self._parameters = dict(module.model.named_parameters())
        self._average: dict[str, torch.Tensor] = {}
        self._changes = 0

    def resident(self, name: str) -> Resident:
        """What it has on the device."""
        reshard(self.module)
        parts = [local_part(parameter.detach()) for parameter in self._parameters.values()]
        return Resident(f"frozen {name}", [*parts, *self._average.values()], self._changes)

    @torch.no_grad()
    def take(self, policy: PackedModel, *, decay: float = 0.0) -> None:
        """`decay` times its weights plus the rest of the policy's; what is an average is kept in float32 beside."""
        reshard(self.module)
        reshard(policy)
        self._changes += 1
        source = dict(policy.model.named_parameters())
        if decay:
            self.start_average()
        for name, parameter in self._parameters.items():
            own, new = local_part(parameter), local_part(source[name])
            own.copy_(self._average[name].lerp_(new.float(), 1.0 - decay) if decay else new)

    def start_average(self) -> None:
        """From here on its weights are what an average in float32 is rounded to."""
        if not self._average:
            parts = ((name, local_part(parameter.detach())) for name, parameter in self._parameters.items())
            self._average = {name: part.to(torch.float32, copy=True) for name, part in parts}

    @torch.no_grad()
    def follow_average(self) -> None:
        """Round the average, where there is one, to the weights."""
        reshard(self.module)
        self._changes += 1
        for name, average in self._average.items():
            local_part(self._parameters[name]).copy_(average)

    def state(self) -> Iterator[Placed]:
        """What a checkpoint keeps of it."""
        parts = ((name, parameter, local_part(parameter.detach())) for name, parameter in self._parameters.items())
        return ((name, parameter, self._average.get(name, part)) for name, parameter, part in parts)

    @torch.no_grad()
    def load_local(self, parts: Sequence[torch.Tensor]) -> None:
        """Take over what `local_copy` gave."""
        reshard(self.module)
        self._changes += 1
        for parameter, part in zip(self._parameters.values(), parts, strict=True):
            local_part(parameter).copy_(part)

    def full_parameters(self) -> Iterator[NamedTensor]:
        """Whole tensors; all ranks iterate together."""
        for name, parameter in self._parameters.items():
            yield name, whole(parameter.detach())


class FrozenSets:
    """`load` reads a module that is not sharded yet, of the policy's own start when it is given none."""

    def __init__(
        self,
        policy: PackedModel,
        mesh: DeviceMesh,
        load: Callable[[Start], PolicyModel],
        progress: Progress,
        *,
        on_host: bool,
        in_float8: bool,
    ) -> None:
        self._policy = policy
        self._load = load
        self._freeze = lambda module: FrozenModel(module, mesh, progress, on_host=on_host, in_float8=in_float8)
        self._resident: dict[str, FrozenModel] = {}
        self._on_host: dict[str, list[torch.Tensor]] = {}
        self._stage: FrozenModel | None = None
        self._staged: str | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._resident or name in self._on_host

    def resident(self) -> Iterator[Resident]:
        """What the sets have on the device."""
        for name, model in self._resident.items():
            yield model.resident(name)
        if self._stage is not None:
            yield self._stage.resident("stage of the host's sets")

    def load(self, name: str, source: Start) -> None:
        self._resident[name] = self._freeze(self._load(source))

    def snapshot(self, name: str, *, decay: float, on_host: bool) -> None:
        if not on_host:
            if name not in self._resident:
                self._resident[name] = self._like_policy()
                decay = 0.0
            self._resident[name].take(self._policy, decay=decay)
            return
        if self._stage is None:
            self._stage = self._like_policy()
        assert decay == 0.0, "an average is kept on the device"
        self._stage.take(self._policy)
        self._on_host[name] = local_copy(self._stage.module)
        self._staged = name

    def _like_policy(self) -> FrozenModel:
        """A model of the policy's shape, to be filled from it."""
        module = self._load(Start())
        module.read_nothing()
        return self._freeze(module)

    def forget(self, name: str) -> None:
        self._resident.pop(name, None)
        self._on_host.pop(name, None)
        if self._staged == name:
            self._staged = None

    def model(self, name: str) -> FrozenModel:
        """The set on the device, brought there if it was on the host."""
        if name in self._resident:
            return self._resident[name]
        assert self._stage is not None
        if self._staged != name:
            self._stage.load_local(self._on_host[name])
            self._staged = name
        return self._stage


def local_copy(module: PackedModel) -> list[torch.Tensor]:
    """This rank's parts, on the host."""
    return [local_part(parameter).detach().to("cpu", copy=True) for parameter in module.model.parameters()]
