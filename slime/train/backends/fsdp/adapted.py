"""The adapter of a sharded model: the weights that leave with it added, and the sets that differ in it alone.

Invariant: a rank adds the adapter to the rows that it holds of a weight, before anything is gathered: B is cut as the
weight is, and A is small enough to be whole on every rank while weights leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from slime.models.lora import LORA_A, LORA_B, is_adapter, peft_targets
from slime.models.peft_adapter import AdapterFacts, merged, peft_name
from slime.train.backends.fsdp.adapter_sets import AdapterSets
from slime.train.backends.fsdp.lora import LoraLayers
from slime.train.backends.fsdp.packed_model import PackedModel
from slime.train.backends.fsdp.sharding import part_on_device, whole
from slime.train.backends.protocol import NamedTensor, TrainedAdapter


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
