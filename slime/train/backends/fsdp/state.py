"""State of a sharded model: this rank's parts of a checkpoint, and frozen sets of weights.

Invariant: of the ranks that hold the same part exactly one writes it, and they take turns; every rank reads only its
own parts, also if the sharding was another when they were written.

Frozen sets are weights that are not trained, by name: reference, teacher, and the weights that the engines sample with.
Invariant: a set of the policy's shape is sharded as the policy is, so copying the policy into it moves nothing between
ranks. A set on the device has a module of its own; sets on the host share one module, which is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from slime.config.initial_weights import InitialWeights
from slime.errors import UserError
from slime.train.backend import NamedTensor, ResidentTensors
from slime.train.backends.fsdp.fused.layer import check_float8, fuse_layers
from slime.train.backends.fsdp.optimizer import MOMENTS, StreamedAdam
from slime.train.backends.fsdp.packed_model import PackedModel, PolicyModel
from slime.train.backends.fsdp.sharding import gather_full_tensor, local_part, reshard, shard
from slime.train.checkpoints.rank_files import SavedPart
from slime.train.checkpoints.reader import SavedTensors
from slime.train.timers import RankProgress

STEP = "step"

LocalPart = tuple[str, torch.Tensor, torch.Tensor]
"""(name of a tensor, a tensor that is sharded like it, this rank's part of it)."""


def with_local_parts(tensors: Iterable[NamedTensor]) -> Iterator[LocalPart]:
    """Pair tensors with this rank's parts of them."""
    return ((name, tensor, local_part(tensor.detach())) for name, tensor in tensors)


def parts_to_write(kind: str, tensors: Iterable[LocalPart], *, rank: int) -> Iterator[SavedPart]:
    """Yield the parts that this rank has to write; rank 0 writes tensors that are whole on every rank."""
    for turn, (name, like, part) in enumerate(tensors):
        if _writes(like, turn, rank) and (part.numel() or not like.numel()):
            yield SavedPart(kind, name, part, tuple(like.shape), local_offset(like))


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
        keys = [f"{part}/{name}" for part in (*MOMENTS, STEP)]
        found = [key for key in keys if key in saved]
        if not found:
            continue
        if found != keys:
            raise UserError(f"checkpoint {saved.folder} has half an optimizer state for {name}: it is damaged")
        if isinstance(optimizer, StreamedAdam):  # which decides where and in which dtype moments are
            state = optimizer.state_of(parameter)
        else:
            state = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
            state[STEP] = torch.zeros((), device=parameter.device)
        optimizer.state[parameter] = state
        read_parts(saved, with_local_parts((f"{moment}/{name}", state[moment]) for moment in MOMENTS))
        saved.read_into(f"{STEP}/{name}", state[STEP].view(1))


def local_offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Offset of this rank's part within the whole tensor, for each dimension."""
    offset, size = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        for index, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                dim, count = placement.dim, tensor.device_mesh.size(index)
                begin = min(tensor.device_mesh.get_local_rank(index) * -(-size[dim] // count), size[dim])
                size[dim] = min(-(-size[dim] // count), size[dim] - begin)
                offset[dim] += begin
    return tuple(offset)


def _writes(tensor: torch.Tensor, turn: int, rank: int) -> bool:
    """Return True if it is this rank's turn to write, among the ranks that hold the same part."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    place, count = 0, 1
    for index, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            size = tensor.device_mesh.size(index)
            place, count = place * size + tensor.device_mesh.get_local_rank(index), count * size
    return place == turn % count


class ShardedFrozenModel:
    """A sharded model in the compute dtype that is not trained."""

    def __init__(
        self, module: PolicyModel, mesh: DeviceMesh, progress: RankProgress, *, on_host: bool, in_float8: bool
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

    def resident(self, name: str) -> ResidentTensors:
        """The model's tensors on the device."""
        reshard(self.module)
        parts = [local_part(parameter.detach()) for parameter in self._parameters.values()]
        return ResidentTensors(f"frozen {name}", [*parts, *self._average.values()], self._changes)

    @torch.no_grad()
    def take(self, policy: PackedModel, *, decay: float = 0.0) -> None:
        """Overwrite the weights with `decay * weights + (1 - decay) * policy`; an average is also kept in float32."""
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
        """Keep an average in float32 from now on, of which the weights are the rounded values."""
        if not self._average:
            parts = ((name, local_part(parameter.detach())) for name, parameter in self._parameters.items())
            self._average = {name: part.to(torch.float32, copy=True) for name, part in parts}

    @torch.no_grad()
    def round_average(self) -> None:
        """Overwrite the weights with the rounded average, if there is one."""
        reshard(self.module)
        self._changes += 1
        for name, average in self._average.items():
            local_part(self._parameters[name]).copy_(average)

    def state(self) -> Iterator[LocalPart]:
        """Tensors of a checkpoint, with this rank's parts: the average if there is one, else the weights."""
        parts = ((name, parameter, local_part(parameter.detach())) for name, parameter in self._parameters.items())
        return ((name, parameter, self._average.get(name, part)) for name, parameter, part in parts)

    @torch.no_grad()
    def load_local(self, parts: Sequence[torch.Tensor]) -> None:
        """Overwrite the weights with parts from `local_copy`."""
        reshard(self.module)
        self._changes += 1
        for parameter, part in zip(self._parameters.values(), parts, strict=True):
            local_part(parameter).copy_(part)

    def full_parameters(self) -> Iterator[NamedTensor]:
        """Yield whole parameters; all ranks iterate together."""
        for name, parameter in self._parameters.items():
            yield name, gather_full_tensor(parameter.detach())


class ShardedFrozenSets:
    """Frozen sets of weights, by name.

    `load` makes a module that is not sharded yet; given an empty `Start`, one of the policy's shape.
    """

    def __init__(
        self,
        policy: PackedModel,
        mesh: DeviceMesh,
        load: Callable[[InitialWeights], PolicyModel],
        progress: RankProgress,
        *,
        on_host: bool,
        in_float8: bool,
    ) -> None:
        self._policy = policy
        self._load = load
        self._freeze = lambda module: ShardedFrozenModel(module, mesh, progress, on_host=on_host, in_float8=in_float8)
        self._resident: dict[str, ShardedFrozenModel] = {}
        self._on_host: dict[str, list[torch.Tensor]] = {}
        self._stage: ShardedFrozenModel | None = None
        self._staged: str | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._resident or name in self._on_host

    def resident(self) -> Iterator[ResidentTensors]:
        """Yield the tensors of the sets on the device."""
        for name, model in self._resident.items():
            yield model.resident(name)
        if self._stage is not None:
            yield self._stage.resident("stage of the host's sets")

    def load(self, name: str, source: InitialWeights) -> None:
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

    def _like_policy(self) -> ShardedFrozenModel:
        """Make a model of the policy's shape, with weights of zero, to copy the policy into."""
        module = self._load(InitialWeights())
        module.use_zero_sources()
        return self._freeze(module)

    def forget(self, name: str) -> None:
        self._resident.pop(name, None)
        self._on_host.pop(name, None)
        if self._staged == name:
            self._staged = None

    def model(self, name: str) -> ShardedFrozenModel:
        """The set on the device, copied there if it was on the host."""
        if name in self._resident:
            return self._resident[name]
        assert self._stage is not None
        if self._staged != name:
            self._stage.load_local(self._on_host[name])
            self._staged = name
        return self._stage


def local_copy(module: PackedModel) -> list[torch.Tensor]:
    """Copy this rank's parts of the parameters to the host."""
    return [local_part(parameter).detach().to("cpu", copy=True) for parameter in module.model.parameters()]
