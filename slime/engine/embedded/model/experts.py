"""Experts in the place that transformers' experts interface leaves for them: multiplied in groups, and recorded.

A layer's tokens are sorted by expert and multiplied with all experts in one call; no Python loop goes over experts.
Which experts a token went to is kept beside its KV slot, so that tokens of a shared prefix have theirs too.
Invariant: while a slot holds a token, its row says which experts computed that token in each layer; layers without
experts have zeros, as in SGLang's answers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from slime.engine.embedded.model.attention import AttentionContext, Zeros

if TYPE_CHECKING:  # importing transformers takes longer than a start without it
    from transformers import PreTrainedModel

_names = itertools.count()


class RoutedExperts:
    """One row `[layers, topk]` for each KV slot. `topk` is 0 for models whose experts cannot be seen, or have none."""

    def __init__(self, context: AttentionContext, layers: int) -> None:
        self._context = context
        self._layers = layers
        self.topk = 0
        self._rows: torch.Tensor | None = None  # [slots + 1, layers, topk]
        self._kind = torch.uint8

    @property
    def multiply(self) -> Callable[..., torch.Tensor]:
        """Tokens with their experts, in groups."""
        return self._code[0]

    @cached_property
    def _code(self) -> tuple[Callable[..., torch.Tensor], Callable[..., None]]:
        return _experts_code(self._context.device)

    def allocate(self, slots: int, zeros: Zeros) -> None:
        if self.topk:
            self._rows = zeros((slots + 1, self._layers, self.topk), self._kind)

    def free(self) -> None:
        self._rows = None

    def expect(self, topk: int, count: int) -> None:
        """Tokens go to `topk` of `count` experts."""
        self.topk = max(self.topk, topk)
        self._kind = torch.uint8 if count <= 1 << 8 else torch.int16

    def note(self, layer: int, index: torch.Tensor, count: int) -> None:
        """The tokens of the batch in flight go to the experts `index [T, topk]`, of `count`."""
        if self._rows is None:  # the first pass, before there are slots
            self.expect(index.shape[1], count)
            return
        self._code[1](self._rows, self._context.slots, layer, index)

    def of(self, slots: np.ndarray) -> np.ndarray:
        """The rows of these slots, `[n, layers, topk]`."""
        assert self._rows is not None
        return self._rows[torch.from_numpy(slots).to(self._rows.device)].cpu().numpy()


def _experts_code(device: torch.device) -> tuple[Callable[..., torch.Tensor], Callable[..., None]]:
    """How tokens are multiplied with their experts there, and how rows are written."""
    if device.type == "cuda":
        from slime.engine.embedded.model.expert_kernels import multiply_experts, note_experts

        return multiply_experts, note_experts
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def write(rows: torch.Tensor, slots: torch.Tensor, layer: int, index: torch.Tensor) -> None:
        rows[slots, layer] = index.to(rows.dtype)

    return ALL_EXPERTS_FUNCTIONS["grouped_mm"], write  # torch's own product in groups: one call for all experts


def watch_experts(model: PreTrainedModel, context: AttentionContext) -> RoutedExperts:
    """Let the experts of `model` be multiplied in groups and noted. Models without any are left alone."""
    from transformers.integrations.moe import ExpertsInterface

    routed = RoutedExperts(context, model.config.get_text_config().num_hidden_layers)
    layers = _expert_layers(model)
    if not layers:
        return routed
    for module, layer in layers:
        module.layer_idx = layer  # type: ignore[assignment]

    def experts(
        module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        routed.note(module.layer_idx, top_k_index, module.num_experts)
        return routed.multiply(module, hidden, top_k_index, top_k_weights)

    name = f"slime_experts_{next(_names)}"
    ExpertsInterface.register(name, experts)
    model.set_experts_implementation(name)
    return routed


def _expert_layers(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """The modules that ask transformers' experts interface what to do, and the layers they are in."""
    found = []
    for name, module in model.named_modules():
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer is not None and hasattr(module, "is_concatenated") and hasattr(module, "num_experts"):
            found.append((module, int(layer.group(1))))
    return found
