"""Grouped expert products and routing records, registered in transformers' experts interface.

A layer's tokens are sorted by expert and multiplied with all experts in one call, without a Python loop over experts.
The experts of a token are recorded by KV slot, so tokens of a shared prefix have them too.
Invariant: while a slot holds a token, its row has the experts of that token in each layer; layers without experts have
zeros, as in SGLang's responses.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime.engine.embedded.model.attention import AttentionContext, MakeZeros

if TYPE_CHECKING:  # importing transformers takes longer than the rest of a start
    from transformers import PreTrainedModel

_names = itertools.count()


class RoutedExperts:
    """Routing records: one row `[layers, topk]` per KV slot; `topk` is 0 for models without observable experts."""

    def __init__(self, context: AttentionContext, layers: int) -> None:
        self._context = context
        self._layers = layers
        self.topk = 0
        self._rows: torch.Tensor | None = None  # [slots + 1, layers, topk]
        self._kind = torch.uint8

    @cached_property
    def code(self) -> tuple[Callable[..., torch.Tensor], Callable[..., None]]:
        """Functions of the device: one multiplies tokens with their experts, the other writes rows."""
        if self._context.device.type == "cuda":
            from slime.engine.embedded.model.expert_kernels import multiply_experts, note_experts

            return multiply_experts, note_experts
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        def write(rows: torch.Tensor, slots: torch.Tensor, layer: int, index: torch.Tensor) -> None:
            rows[slots, layer] = index.to(rows.dtype)

        return ALL_EXPERTS_FUNCTIONS["grouped_mm"], write  # torch's own grouped product: one call for all experts

    def allocate(self, slots: int, zeros: MakeZeros) -> None:
        if self.topk:
            self._rows = zeros((slots + 1, self._layers, self.topk), self._kind)

    def free(self) -> None:
        self._rows = None

    def expect(self, topk: int, count: int) -> None:
        """Set the number of experts per token and choose the dtype for `count` experts."""
        self.topk = max(self.topk, topk)
        self._kind = torch.uint8 if count <= 1 << 8 else torch.int16

    def note(self, layer: int, index: torch.Tensor, count: int) -> None:
        """Record that the tokens of the batch in flight use the experts `index [T, topk]`, of `count`."""
        if self._rows is None:  # the first pass, before slots are allocated
            self.expect(index.shape[1], count)
            return
        self.code[1](self._rows, self._context.slots, layer, index)

    def of(self, slots: np.ndarray) -> np.ndarray:
        """Return the rows of these slots, `[n, layers, topk]`."""
        assert self._rows is not None
        return self._rows[torch.from_numpy(slots).to(self._rows.device)].cpu().numpy()


def watch_experts(model: PreTrainedModel, context: AttentionContext) -> RoutedExperts:
    """Install grouped products and routing records in the experts of `model`; a model without experts is unchanged.

    Experts are the modules that use transformers' experts interface.
    """
    from transformers.integrations.moe import ExpertsInterface

    routed = RoutedExperts(context, model.config.get_text_config().num_hidden_layers)
    has_experts = False
    for module_name, module in model.named_modules():
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", module_name)
        if layer is not None and hasattr(module, "is_concatenated") and hasattr(module, "num_experts"):
            module.layer_idx, has_experts = int(layer.group(1)), True
    if not has_experts:
        return routed

    def experts(
        module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        routed.note(module.layer_idx, top_k_index, module.num_experts)
        return routed.code[0](module, hidden, top_k_index, top_k_weights)

    name = f"slime_experts_{next(_names)}"
    ExpertsInterface.register(name, experts)
    model.set_experts_implementation(name)
    return routed
