"""The adapter of a sharded model: the weights that leave with it added, and the sets that differ in it alone.

Invariant: a rank adds the adapter to the rows that it holds of a weight, before anything is gathered: B is cut as the
weight is, and A is small enough to be whole on every rank while weights leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from slime.models.lora import LORA_A, LORA_B, is_adapter, peft_targets
from slime.models.peft_adapter import AdapterFacts, merged, peft_name
from slime.train.backends.fsdp.lora import LoraLayers
from slime.train.backends.fsdp.packed_model import PackedModel
from slime.train.backends.fsdp.sharding import gather_like, local_part, part_on_device, reshard, whole
from slime.train.backends.fsdp.state import Placed
from slime.train.backends.protocol import NamedTensor, TrainedAdapter

# Frozen sets of a policy with LoRA: what differs from the policy is the adapter, so that is all a set keeps.
#
# Invariant: whatever happens inside `using`, the policy's own matrices are in their place after it. The set that has
# no adapter at all is the model that the run began with, which needs no memory of its own.

Parts = Mapping[str, Tensor]
"""This rank's parts of the matrices, by name."""


class AdapterSets:
    """Copies of the policy's adapter, by name; None stands for no adapter."""

    def __init__(self, policy: PackedModel, layers: LoraLayers) -> None:
        self._policy = policy
        self._layers = layers
        parameters = dict(policy.model.named_parameters())
        self._adapter: dict[str, nn.Parameter] = {name: parameters[name] for name in layers.shapes}
        self._sets: dict[str, Parts | None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._sets

    def add_base(self, name: str) -> None:
        """A set of the weights beside which the adapter is trained."""
        self._sets[name] = None

    def snapshot(self, name: str, *, on_host: bool) -> None:
        self._sets[name] = self._copy("cpu" if on_host else None)

    def forget(self, name: str) -> None:
        self._sets.pop(name, None)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Within, the policy's module has the weights of this set."""
        parts = self._sets[name]
        if parts is None:
            with self._layers.off():
                yield
            return
        own = self._copy(None)
        self._put(parts)
        try:
            yield
        finally:
            self._put(own)

    def full_parameters(self, name: str) -> Iterator[NamedTensor]:
        """The matrices of a set, whole; all ranks iterate together. Without an adapter they are zero."""
        for key, parameter, part in self.placed(name):
            yield key, gather_like(parameter, part.to(parameter.device))

    def placed(self, name: str) -> Iterator[Placed]:
        """This rank's parts of the matrices of a set, beside the parameters that they are cut as."""
        parts = self._sets[name]
        for key, parameter in self._adapter.items():
            yield key, parameter, torch.zeros_like(local_part(parameter)) if parts is None else parts[key]

    def _copy(self, device: str | None) -> Parts:
        parts = ((name, local_part(parameter.detach())) for name, parameter in self._adapter.items())
        return {name: part.to(device or part.device, copy=True) for name, part in parts}

    @torch.no_grad()
    def _put(self, parts: Parts) -> None:
        reshard(self._policy)
        for name, parameter in self._adapter.items():
            local_part(parameter).copy_(parts[name])


class AdaptedModel:
    """Made of a module that is sharded already."""

    def __init__(self, module: PackedModel, layers: LoraLayers, *, base: Path, base_dtype: torch.dtype) -> None:
        self._parameters = dict(module.model.named_parameters())
        self._layers = layers
        self._whole_a: dict[str, Tensor] = {}
        self.sets = AdapterSets(module, layers)
        facts = AdapterFacts(layers.lora.rank, layers.lora.alpha, base_dtype)
        targets = peft_targets(layers.modules, layers.linears)
        self.info = TrainedAdapter(facts, layers.lora.targets, tuple(targets), base)

    @property
    def trained(self) -> dict[str, Tensor]:
        """What is trained, which is all that a checkpoint holds: the matrices, and a critic's head."""
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    @property
    def leaving(self) -> dict[str, Tensor]:
        """The model's own parameters, under whose names the weights leave."""
        return {name: parameter for name, parameter in self._parameters.items() if not is_adapter(name)}

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, `rows` knows every A; all ranks enter together."""
        self._whole_a = {module: whole(self._parameters[module + LORA_A].detach()) for module in self._layers.modules}
        try:
            yield
        finally:
            self._whole_a = {}

    def rows(self, name: str) -> Tensor:
        """This rank's part of a parameter as it leaves: in float32 where an adapter is added."""
        own, module = part_on_device(self._parameters[name].detach()), name.removesuffix(".weight")
        if module not in self._whole_a:
            return own
        b = part_on_device(self._parameters[module + LORA_B].detach())
        return merged(own, self._whole_a[module], b, scale=self._layers.lora.scale, dtype=torch.float32)

    def full_adapter(self) -> Iterator[NamedTensor]:
        """The matrices under their names in PEFT's files, whole; all ranks iterate together."""
        for name in self._layers.shapes:
            yield peft_name(name), whole(self._parameters[name].detach())
