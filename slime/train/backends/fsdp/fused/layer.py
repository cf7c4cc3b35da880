"""A decoder layer of the plain kind (norm, attention, norm, gated MLP) in the place of transformers'.

Invariant: parameters are those of the layer it replaces, under their names, and the numbers are its numbers but for
rounding: what lies between two matrix products is computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from slime.train.backends.fsdp.attention import packed_attention
from slime.train.backends.fsdp.fused.facts import LayerFacts

PLAIN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class FusedLayer(GradientCheckpointingLayer):
    """Takes the place of transformers' layer, with its parts."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.training = layer.training
        self.gradient_checkpointing = layer.gradient_checkpointing
        attention = layer.self_attn
        config, dim = attention.config, int(attention.head_dim)
        heads, kv_heads = (len(linear.weight) // dim for linear in (attention.q_proj, attention.k_proj))
        eps = float(layer.input_layernorm.variance_epsilon)
        self._has_norms = "q_norm" in dict(attention.named_children())
        head_eps = float(attention.q_norm.variance_epsilon) if self._has_norms else eps
        self._facts = LayerFacts(heads, kv_heads, eps, head_eps)
        is_mistral = type(layer).__name__ == "MistralDecoderLayer"
        windows = config.sliding_window if is_mistral else vars(attention).get("sliding_window")
        self._window: int | None = windows
        self._second_eps = float(layer.post_attention_layernorm.variance_epsilon)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: Any
    ) -> Tensor:
        """[1, T, H] to [1, T, H]."""
        from slime.train.backends.fsdp.fused.halves import FromHeads, ToHeads  # with Triton, which only a GPU needs

        assert position_embeddings is not None
        attention: Any = self.self_attn
        mlp: Any = self.mlp
        cos, sin = (part[0].contiguous() for part in position_embeddings)
        linears = [getattr(attention, name) for name in _PROJECTIONS[:3]]
        norms = (attention.q_norm.weight, attention.k_norm.weight) if self._has_norms else (None, None)
        queries, keys, values, hidden = ToHeads.apply(
            hidden_states.squeeze(0),
            cos,
            sin,
            self.input_layernorm.weight,
            self._facts,
            *(linear.weight for linear in linears),
            *(linear.bias for linear in linears),
            *norms,
        )
        by_head = (states.transpose(0, 1)[None] for states in (queries, keys, values))
        attended, _ = packed_attention(
            attention, *by_head, None, scaling=attention.scaling, sliding_window=self._window
        )
        return FromHeads.apply(
            attended.squeeze(0).flatten(1),
            hidden,
            self._second_eps,
            attention.o_proj.weight,
            self.post_attention_layernorm.weight,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            mlp.down_proj.weight,
        )


def fuse_layers(model: PreTrainedModel) -> None:
    """Put a `FusedLayer` in the place of every layer that is of the plain kind."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child):
                setattr(parent, name, FusedLayer(child))


def is_plain(layer: nn.Module) -> bool:
    """Whether it is a layer of transformers' own whose halves are those above."""
    kind = type(layer)
    if kind.__name__ not in PLAIN_LAYERS or not kind.__module__.startswith("transformers.models."):
        return False
    parts: Any = layer
    attention, mlp = parts.self_attn, parts.mlp
    linears = [getattr(attention, name) for name in _PROJECTIONS]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    biases = (
        {linear.bias is not None for linear in linears[:3]} if all(type(x) is nn.Linear for x in linears) else set()
    )
    return (
        len(biases) == 1
        and all(linear.bias is None for linear in linears[3:])
        and attention.config.hidden_act in ("silu", "swish")
        and attention.head_dim % 2 == 0
        and (attention.config.rope_parameters or {}).get("partial_rotary_factor", 1.0) == 1.0
    )
