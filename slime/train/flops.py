"""Counts the training FLOPs of a sequence from the model's config alone.

    training(L) = 3 (per_token L + per_pair sum over attention layers of pairs(L, window))

A forward pass costs 2 FLOPs for each weight that a token uses (projections, its own experts and their router, LM head)
and, in an attention layer, for each number of the scores and of the weighted values of a query-key pair. The backward
pass costs twice the forward pass. Causal attention has `L (L + 1) / 2` pairs; a sliding window limits keys per query to
`window`; linear attention keeps a state of fixed size and has no pairs. Norms, activations, biases and embeddings are
not counted, nor is recomputation, which scales all terms equally.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.errors import UserError
from slime.models.shape import GATED_DELTA_FAMILIES, ModelShape
from slime.storage.json_types import JsonMapping

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PASSES = 3


@dataclass(frozen=True)
class FlopsModel:
    """Coefficients of the FLOPs formula; `layers_by_window` counts attention layers by window (None: no limit)."""

    per_token: float
    per_pair: float
    layers_by_window: Mapping[int | None, int]

    @classmethod
    def from_config(cls, hf_config: PretrainedConfig) -> FlopsModel:
        """Make the FLOPs model of a transformers config; of a multimodal one, of its text part."""
        facts = hf_config.get_text_config().to_dict()
        shape = ModelShape.from_config(facts)
        forward = shape.flops_per_token(0)
        if forward is None or shape.num_layers is None or shape.num_heads is None or shape.head_dim is None:
            raise UserError(
                f"--balance-data, --balance-by-flops: the config of a {shape.model_type} model does not determine its "
                "FLOPs; leave these flags out"
            )
        default_kind = "sliding_attention" if facts.get("sliding_window") else "full_attention"
        kinds = [str(kind) for kind in facts.get("layer_types") or [default_kind] * shape.num_layers]
        linear_layers = kinds.count("linear_attention")
        forward += 2 * linear_layers * _linear_layer_excess(facts, shape)
        windows = Counter(
            facts.get("sliding_window") if kind == "sliding_attention" else None
            for kind in kinds
            if kind != "linear_attention"
        )
        return cls(float(forward), 4.0 * shape.num_heads * shape.head_dim, dict(windows))

    def sequence(self, length: int) -> float:
        """Count the training FLOPs of one sequence."""
        pairs = sum(layers * causal_pairs(length, window) for window, layers in self.layers_by_window.items())
        return PASSES * (self.per_token * length + self.per_pair * pairs)

    def packed(self, lengths: Sequence[int]) -> float:
        """Count the training FLOPs of a packed row: the sum over its sequences, because attention stays within each."""
        return sum(self.sequence(length) for length in lengths)


def causal_pairs(length: int, window: int | None) -> int:
    """Count query-key pairs if a token attends to itself and earlier tokens, at most `window` in all."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def _linear_layer_excess(facts: JsonMapping, shape: ModelShape) -> int:
    """Count multiply-adds per token of a linear-attention layer beyond the projections of an attention layer.

    A gated delta rule reads its state, corrects it and reads it again: three products of key and value size per head.
    For other kinds only the heads are known: projections like attention's, and a state that is written and read.
    """
    heads, head_dim, hidden = shape.num_heads or 0, shape.head_dim or 0, shape.hidden_size or 0
    if shape.model_type not in GATED_DELTA_FAMILIES:
        return 2 * heads * head_dim * head_dim
    value_heads, key_size = facts["linear_num_value_heads"], facts["linear_key_head_dim"]
    keys, values = facts["linear_num_key_heads"] * key_size, value_heads * facts["linear_value_head_dim"]
    projections = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    convolution = (2 * keys + values) * facts["linear_conv_kernel_dim"]
    state = 3 * values * key_size
    return projections + convolution + state - (shape.attention_weights_per_layer or 0)
