"""Adapter of a sharded model: export of weights with the adapter merged, and frozen sets that differ only in it.

Invariant: a rank merges the adapter into the rows of a weight that it holds, before anything is gathered: B is sharded
as the weight is, and A is small enough to be whole on every rank during an export.

A frozen set of a policy with LoRA keeps only its adapter. Invariant: after `using`, also after an exception inside it,
the policy has its own matrices again. The set without an adapter is the model that the run began with, and needs no
memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from slime.models.lora import LORA_A, LORA_B, is_adapter, peft_targets
from slime.models.peft_adapter import AdapterConfig, merge_lora, peft_name
from slime.train.backend import NamedTensor, TrainedAdapter
from slime.train.backends.fsdp.lora import LoraLayers
from slime.train.backends.fsdp.packed_model import PackedModel
from slime.train.backends.fsdp.sharding import (
    gather_full_tensor,
    gather_like,
    local_part,
    part_on_device,
    reshard,
)
from slime.train.backends.fsdp.state import LocalPart

AdapterParts = Mapping[str, Tensor]
"""This rank's parts of the matrices, by name."""


class AdapterSets:
    """Frozen sets as copies of the policy's adapter, by name; None means no adapter."""

    def __init__(self, policy: PackedModel, layers: LoraLayers) -> None:
        self._policy = policy
        self._layers = layers
        parameters = dict(policy.model.named_parameters())
        self._adapter: dict[str, nn.Parameter] = {name: parameters[name] for name in layers.shapes}
        self._sets: dict[str, AdapterParts | None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._sets

    def add_base(self, name: str) -> None:
        """Add a set that consists of the base weights, without an adapter."""
        self._sets[name] = None

    def snapshot(self, name: str, *, on_host: bool) -> None:
        self._sets[name] = self._copy("cpu" if on_host else None)

    def forget(self, name: str) -> None:
        self._sets.pop(name, None)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Give the policy's module the weights of this set inside the context."""
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
        """Yield the whole matrices of a set, zeros without an adapter; all ranks iterate together."""
        for key, parameter, part in self.placed(name):
            yield key, gather_like(parameter, part.to(parameter.device))

    def placed(self, name: str) -> Iterator[LocalPart]:
        """Yield this rank's parts of the matrices of a set, with the parameters that are sharded like them."""
        parts = self._sets[name]
        for key, parameter in self._adapter.items():
            yield key, parameter, torch.zeros_like(local_part(parameter)) if parts is None else parts[key]

    def _copy(self, device: str | None) -> AdapterParts:
        parts = ((name, local_part(parameter.detach())) for name, parameter in self._adapter.items())
        return {name: part.to(device or part.device, copy=True) for name, part in parts}

    @torch.no_grad()
    def _put(self, parts: AdapterParts) -> None:
        reshard(self._policy)
        for name, parameter in self._adapter.items():
            local_part(parameter).copy_(parts[name])


class AdaptedModel:
    """The adapter of a module that is already sharded: its export and its frozen sets."""

    def __init__(self, module: PackedModel, layers: LoraLayers, *, base: Path, base_dtype: torch.dtype) -> None:
        self._parameters = dict(module.model.named_parameters())
        self._layers = layers
        self._whole_a: dict[str, Tensor] = {}
        self.sets = AdapterSets(module, layers)
        facts = AdapterConfig(layers.lora.rank, layers.lora.alpha, base_dtype)
        targets = peft_targets(layers.modules, layers.linears)
        self.info = TrainedAdapter(facts, layers.lora.targets, tuple(targets), base)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The trained parameters, which are all that a checkpoint has: the matrices, and a critic's head."""
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    @property
    def leaving(self) -> dict[str, Tensor]:
        """The model's own parameters, under whose names the weights are exported."""
        return {name: parameter for name, parameter in self._parameters.items() if not is_adapter(name)}

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather every A for `rows` inside the context; all ranks enter together."""
        self._whole_a = {
            module: gather_full_tensor(self._parameters[module + LORA_A].detach()) for module in self._layers.modules
        }
        try:
            yield
        finally:
            self._whole_a = {}

    def rows(self, name: str) -> Tensor:
        """This rank's part of a parameter for the export: with the adapter merged, in float32, if it has one."""
        own, module = part_on_device(self._parameters[name].detach()), name.removesuffix(".weight")
        if module not in self._whole_a:
            return own
        b = part_on_device(self._parameters[module + LORA_B].detach())
        return merge_lora(own, self._whole_a[module], b, scale=self._layers.lora.scale, dtype=torch.float32)

    def full_adapter(self) -> Iterator[NamedTensor]:
        """Yield the whole matrices under their names in PEFT's files; all ranks iterate together."""
        for name in self._layers.shapes:
            yield peft_name(name), gather_full_tensor(self._parameters[name].detach())
