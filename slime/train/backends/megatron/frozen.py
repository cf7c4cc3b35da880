"""Weights that are not trained, by name: reference, teacher, and those the engines sample with.

Invariant: a set of the policy's shape is cut as the policy is, so copying the policy into it moves nothing between
ranks. A set on the device has stages of its own; those on the host share one set of stages, which is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from slime.config.initial_weights import Start
from slime.train.backends.megatron.names import global_buffers, global_names
from slime.train.backends.megatron.passes import StagedModel
from slime.train.backends.protocol import Resident


class FrozenModel:
    """A model in the compute dtype."""

    def __init__(self, model: StagedModel) -> None:
        self.model = model
        for stage in model.stages:
            stage.requires_grad_(False)
            stage.eval()
        self.tensors: dict[str, Tensor] = {**global_names(model.stages), **global_buffers(model.stages)}
        self.average: dict[str, Tensor] = {}
        self._changes = 0

    def resident(self, name: str) -> Resident:
        """What it has on the device."""
        return Resident(f"frozen {name}", [*self.tensors.values(), *self.average.values()], self._changes)

    @torch.no_grad()
    def take(self, policy: Mapping[str, Tensor], *, decay: float = 0.0) -> None:
        """`decay` times its weights plus the rest of the policy's; what is an average is kept in float32 beside."""
        self._changes += 1
        if decay:
            self.start_average()
        for name, tensor in self.tensors.items():
            new = policy[name]
            tensor.copy_(self.average[name].lerp_(new.float(), 1.0 - decay) if decay else new)

    def start_average(self) -> None:
        """From here on its weights are what an average in float32 is rounded to."""
        if not self.average:
            self.average = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in self.tensors.items()}

    @property
    def kept(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it."""
        return self.average or self.tensors

    @torch.no_grad()
    def follow_average(self) -> None:
        """Round the average, where there is one, to the weights."""
        self._changes += 1
        for name, average in self.average.items():
            self.tensors[name].copy_(average)

    @torch.no_grad()
    def load_local(self, parts: Mapping[str, Tensor]) -> None:
        self._changes += 1
        for name, part in parts.items():
            self.tensors[name].copy_(part)


class FrozenSets:
    """`load` makes the stages of a folder with its weights, `like_policy` those of the policy's shape with any."""

    def __init__(
        self,
        policy: Mapping[str, Tensor],
        load: Callable[[Start], StagedModel],
        like_policy: Callable[[], StagedModel],
    ) -> None:
        self._policy = policy
        self._load = load
        self._like_policy = like_policy
        self._resident: dict[str, FrozenModel] = {}
        self._on_host: dict[str, dict[str, Tensor]] = {}
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
        self._resident[name] = FrozenModel(self._load(source))

    def snapshot(self, name: str, *, decay: float, on_host: bool) -> None:
        if not on_host:
            if name not in self._resident:
                self._resident[name] = FrozenModel(self._like_policy())
                decay = 0.0
            self._resident[name].take(self._policy, decay=decay)
            return
        if self._stage is None:
            self._stage = FrozenModel(self._like_policy())
        assert decay == 0.0, "an average is kept on the device"
        self._stage.take(self._policy)
        self._on_host[name] = {key: tensor.detach().to("cpu", copy=True) for key, tensor in self._stage.tensors.items()}
        self._staged = name

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
