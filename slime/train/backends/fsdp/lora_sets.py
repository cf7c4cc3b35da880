"""Adapter of a sharded model: export of weights with the adapter merged, and frozen sets that differ only in it.

Invariant: a rank merges the adapter into the rows of a weight that it holds, before anything is gathered: B is sharded
as the weight is, and A is small enough to be whole on every rank during an export.

A frozen set of a policy with LoRA keeps only its adapter. Invariant: after `using`, also after an exception inside it,
the policy has its own matrices again. The set without an adapter is the model that the run began with, and needs no
memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from slime.config.initial_weights import InitialWeights
from slime.models.lora import LORA_A, LORA_B, is_adapter, peft_targets
from slime.models.peft_adapter import AdapterConfig, merge_lora, peft_name
from slime.train.backend import NamedTensor, TrainedAdapter
from slime.train.backends.frozen import FrozenSets, Parts, ShardedModel
from slime.train.backends.fsdp.lora import LoraLayers
from slime.train.backends.fsdp.packed_model import PackedModel
from slime.train.backends.fsdp.sharding import gather_full_tensor, local_part, part_on_device
from slime.train.backends.fsdp.state import LocalPart


class PolicyAdapter(FrozenSets[PackedModel]):
    """The adapter of a sharded policy, with its frozen sets: copies of the adapter, or None for the base weights.

    `base_of` returns the folder of the base weights of a source.
    """

    def __init__(
        self,
        policy: ShardedModel[PackedModel],
        load: Callable[[InitialWeights], ShardedModel[PackedModel]],
        like_policy: Callable[[], ShardedModel[PackedModel]],
        layers: LoraLayers,
        *,
        base: Path,
        base_of: Callable[[InitialWeights], Path],
        base_dtype: torch.dtype,
    ) -> None:
        super().__init__(policy, load, like_policy)
        self._layers = layers
        self._base_of = base_of
        self._adapters: dict[str, Parts | None] = {}
        self._parameters = policy.model.placed
        self._whole_a: dict[str, Tensor] = {}
        facts = AdapterConfig(layers.lora.rank, layers.lora.alpha, base_dtype)
        targets = peft_targets(layers.modules, layers.linears)
        self.info = TrainedAdapter(facts, layers.lora.targets, tuple(targets), base)

    def __contains__(self, name: str) -> bool:
        return name in self._adapters or super().__contains__(name)

    def load(self, name: str, source: InitialWeights) -> None:
        if self._base_of(source) == self.info.base:
            self._adapters[name] = None
        else:
            super().load(name, source)

    def snapshot(self, name: str, *, decay: float = 0.0, on_host: bool = False) -> None:
        assert decay == 0.0, "the average of two adapters has another rank"
        super().forget(name)
        self._adapters[name] = self._copy("cpu" if on_host else None)

    def forget(self, name: str) -> None:
        super().forget(name)
        self._adapters.pop(name, None)

    @contextmanager
    def using(self, name: str) -> Iterator[ShardedModel[PackedModel]]:
        """Give the policy's module the weights of this set inside the context."""
        if name not in self._adapters:
            with super().using(name) as model:
                yield model
            return
        parts = self._adapters[name]
        if parts is None:
            with self._layers.off():
                yield self._policy
            return
        own = self._copy(None)
        self._put(parts)
        try:
            yield self._policy
        finally:
            self._put(own)

    @contextmanager
    def reading(self, name: str, saved: Iterable[str], *, averages: bool) -> Iterator[None]:
        if any(map(is_adapter, saved)):  # a set that was loaded as a separate model is an adapter in the checkpoint
            self.snapshot(name)
            yield
            return
        with super().reading(name, saved, averages=averages):
            yield

    def placed(self, name: str) -> Iterator[LocalPart] | None:
        """This rank's parts of a set's matrices, with the parameters sharded like them; None if it is no adapter."""
        if name not in self._adapters:
            return None
        parts = self._adapters[name]
        own = ((key, self._parameters[key]) for key in self._layers.shapes)
        return ((key, like, torch.zeros_like(local_part(like)) if parts is None else parts[key]) for key, like in own)

    def _copy(self, device: str | None) -> Parts:
        parts = self._policy.parts()
        return {name: parts[name].to(device or parts[name].device, copy=True) for name in self._layers.shapes}

    @torch.no_grad()
    def _put(self, parts: Parts) -> None:
        own = self._policy.parts()
        for name in self._layers.shapes:
            own[name].copy_(parts[name])

    # export

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather every A for `merged` inside the context; all ranks enter together."""
        self._whole_a = {
            module: gather_full_tensor(self._parameters[module + LORA_A].detach()) for module in self._layers.modules
        }
        try:
            yield
        finally:
            self._whole_a = {}

    def merged(self, name: str, rows: Tensor) -> Tensor:
        """Merge the adapter into this rank's rows of a parameter, in float32; the rows themselves if it has none."""
        module = name.removesuffix(".weight")
        if module not in self._whole_a:
            return rows
        b = part_on_device(self._parameters[module + LORA_B].detach())
        return merge_lora(rows, self._whole_a[module], b, scale=self._layers.lora.scale, dtype=torch.float32)

    def full_adapter(self) -> Iterator[NamedTensor]:
        """Yield the whole matrices under their names in PEFT's files; all ranks iterate together."""
        for name in self._layers.shapes:
            yield peft_name(name), gather_full_tensor(self._parameters[name].detach())
