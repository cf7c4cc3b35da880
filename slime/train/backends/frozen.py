"""Frozen sets: weights that are not trained, by name: reference, teacher, and the weights that the engines sample with.

Invariant: a set of the policy's shape is sharded as the policy is, so copying the policy into it moves nothing between
ranks. A set on the device has a model of its own; sets on the host share one model, which is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from slime.config.initial_weights import InitialWeights

Model = TypeVar("Model")
Parts = Mapping[str, Tensor]


@dataclass(frozen=True)
class ResidentTensors:
    """Tensors of one kind that stay on the device between two passes."""

    kind: str
    tensors: Sequence[Tensor]
    version: int | None = None
    """Changes when the tensors' values change; None: every update changes them."""
    is_zero: bool = False
    """True if they contain only zeros between two passes, such as gradients that are kept in one buffer."""


class ShardedModel(Generic[Model]):
    """A model, and `parts`, which returns this rank's present part of each of its tensors by name."""

    def __init__(self, model: Model, parts: Callable[[], Parts]) -> None:
        self.model = model
        self.parts = parts


class FrozenModel(ShardedModel[Model]):
    """A model in the compute dtype that is not trained."""

    def __init__(self, loaded: ShardedModel[Model]) -> None:
        super().__init__(loaded.model, loaded.parts)
        self._average: dict[str, Tensor] = {}
        self._changes = 0

    def resident(self, name: str) -> ResidentTensors:
        """The model's tensors on the device."""
        return ResidentTensors(f"frozen {name}", [*self.parts().values(), *self._average.values()], self._changes)

    @torch.no_grad()
    def take(self, source: Parts, *, decay: float = 0.0) -> None:
        """Overwrite the weights with `decay * weights + (1 - decay) * source`; an average is also kept in float32."""
        self._changes += 1
        if decay:
            self.start_average()
        for name, own in self.parts().items():
            new = source[name]
            own.copy_(self._average[name].lerp_(new.float(), 1.0 - decay) if decay else new)

    def start_average(self) -> None:
        """Keep an average in float32 from now on, of which the weights are the rounded values."""
        if not self._average:
            self._average = {name: own.detach().to(torch.float32, copy=True) for name, own in self.parts().items()}

    @property
    def saved(self) -> Parts:
        """This rank's parts for a checkpoint: of the average if there is one, else of the weights."""
        return self._average or self.parts()

    @torch.no_grad()
    def round_average(self) -> None:
        """Overwrite the weights with the rounded average, if there is one."""
        self._changes += 1
        own = self.parts()
        for name, average in self._average.items():
            own[name].copy_(average)


class FrozenSets(Generic[Model]):
    """Frozen sets by name; `load` builds the model of a source, `like_policy` one to copy the policy into."""

    def __init__(
        self,
        policy: ShardedModel[Model],
        load: Callable[[InitialWeights], ShardedModel[Model]],
        like_policy: Callable[[], ShardedModel[Model]],
    ) -> None:
        self._policy = policy
        self._load = load
        self._like_policy = like_policy
        self._resident: dict[str, FrozenModel[Model]] = {}
        self._on_host: dict[str, Parts] = {}
        self._stage: FrozenModel[Model] | None = None
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
        """Load a set from a folder, in the compute dtype; its shape may differ from the policy's."""
        self._resident[name] = FrozenModel(self._load(source))

    def snapshot(self, name: str, *, decay: float = 0.0, on_host: bool = False) -> None:
        """Make or overwrite a set: `decay * set + (1 - decay) * policy`, with the policy's present weights."""
        if not on_host:
            if name not in self._resident:
                self._resident[name] = FrozenModel(self._like_policy())
                decay = 0.0
            self._resident[name].take(self._policy.parts(), decay=decay)
            return
        if self._stage is None:
            self._stage = FrozenModel(self._like_policy())
        assert decay == 0.0, "an average is kept on the device"
        self._stage.take(self._policy.parts())
        own = self._stage.parts()
        self._on_host[name] = {key: part.detach().to("cpu", copy=True) for key, part in own.items()}
        self._staged = name

    def forget(self, name: str) -> None:
        """Drop a set."""
        self._resident.pop(name, None)
        self._on_host.pop(name, None)
        if self._staged == name:
            self._staged = None

    def model(self, name: str) -> FrozenModel[Model]:
        """The set on the device, copied there if it was on the host."""
        if name in self._resident:
            return self._resident[name]
        assert self._stage is not None
        if self._staged != name:
            self._stage.take(self._on_host[name])
            self._staged = name
        return self._stage

    @contextmanager
    def using(self, name: str) -> Iterator[ShardedModel[Model]]:
        """Yield the model whose passes are those of this set, inside the context."""
        yield self.model(name)

    @contextmanager
    def reading(self, name: str, saved: Iterable[str], *, averages: bool) -> Iterator[None]:
        """Prepare a set for the checkpoint that is read inside the context; `saved`: names of its tensors."""
        frozen = self.model(name)
        if averages:
            frozen.start_average()
        yield
        frozen.round_average()
