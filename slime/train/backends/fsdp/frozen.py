"""Weights that are not trained, by name: reference, teacher, and those the engines sample with.

Invariant: a set of the policy's shape is sharded as the policy is, so copying the policy into it moves nothing between
ranks. A set on the device has a module of its own; those on the host share one, which is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from slime.config.initial_weights import Start
from slime.train.backends.fsdp.fused.layer import check_float8, fuse_layers
from slime.train.backends.fsdp.packed_model import PackedModel, PolicyModel
from slime.train.backends.fsdp.sharding import local_part, reshard, shard, whole
from slime.train.backends.fsdp.state import Placed
from slime.train.backends.protocol import NamedTensor, Resident
from slime.train.progress import Progress


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
