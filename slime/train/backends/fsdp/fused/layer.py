"""Fused decoder layer of the plain kind (norm, attention, norm, gated MLP), which replaces transformers'.

Invariant: parameters are those of the layer it replaces, under their names, and results differ from its results only by
rounding: operations between two matrix products are computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from slime.errors import UserError
from slime.train.backends.fsdp.attention import packed_attention, packed_context_of, shared_prompt_attention
from slime.train.backends.fsdp.fused.layer_parts import LayerFacts
from slime.train.backends.fsdp.lora import LoraLinear

PLAIN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
_LINEARS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
FLOAT8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
FLOAT8_MULTIPLE = 16  # of the sides of a matrix


class FusedLayer(GradientCheckpointingLayer):
    """Replaces transformers' layer, with the same child modules."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def __init__(self, layer: GradientCheckpointingLayer, *, in_float8: bool = False) -> None:
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
        second_eps = float(layer.post_attention_layernorm.variance_epsilon)
        scale = next((linear.scale for linear in _linears(self) if isinstance(linear, LoraLinear)), 0.0)
        self._facts = LayerFacts(heads, kv_heads, eps, head_eps, second_eps, in_float8, scale)
        is_mistral = type(layer).__name__ == "MistralDecoderLayer"
        windows = config.sliding_window if is_mistral else vars(attention).get("sliding_window")
        self._window: int | None = windows

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: object
    ) -> Tensor:
        """Compute the layer's output: [1, t, H] to [1, t, H]."""
        from slime.train.backends.fsdp.fused.blocks import FromHeads, ToHeads  # imports Triton, needed only on a GPU

        assert position_embeddings is not None
        attention: Any = self.self_attn
        context = packed_context_of(attention)
        linears = _linears(self)
        cos, sin = (part[0].contiguous() for part in position_embeddings)
        norms = (attention.q_norm.weight, attention.k_norm.weight) if self._has_norms else (None, None)
        queries, keys, values, hidden = ToHeads.apply(
            hidden_states.squeeze(0),
            cos,
            sin,
            self.input_layernorm.weight,
            self._facts,
            context.shared,
            *(linear.weight for linear in linears[:3]),
            *(linear.bias for linear in linears[:3]),
            *norms,
            *_matrices(linears[:3]),
        )
        if context.shared is None:
            by_head = (states.transpose(0, 1)[None] for states in (queries, keys, values))
            attended, _ = packed_attention(
                attention, *by_head, None, scaling=attention.scaling, sliding_window=self._window
            )
        else:
            attended = shared_prompt_attention(context, queries, keys, values, attention.scaling, self._window)[None]
        return FromHeads.apply(
            attended.squeeze(0).flatten(1),
            hidden,
            torch.is_grad_enabled(),
            self._facts,
            self.post_attention_layernorm.weight,
            *(linear.weight for linear in linears[3:]),
            *_matrices(linears[3:]),
        )


class FusedNorm(nn.Module):
    """Replaces the norm after the last layer, with the same weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._eps = float(norm.variance_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute the norm: [1, T, H] to [1, T, H]."""
        from slime.train.backends.fsdp.fused.blocks import LastNorm

        return LastNorm.apply(hidden_states.squeeze(0), self.weight, self._eps)[None]


def fuse_layers(model: PreTrainedModel, *, in_float8: bool = False) -> None:
    """Replace every layer of the plain kind by a `FusedLayer`, and the norm after them by a `FusedNorm`.

    `in_float8`: the forward's matrix products are in 8-bit floats, as `check_float8` permits.
    """
    kinds = set()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child):
                kinds.add(type(child.input_layernorm))
                setattr(parent, name, FusedLayer(child, in_float8=in_float8))
    body = model.base_model
    if "norm" in dict(body.named_children()) and type(body.norm) in kinds:
        body.norm = FusedNorm(body.norm)


def is_plain(layer: nn.Module) -> bool:
    """Return True for a layer of transformers' that `FusedLayer` can replace."""
    kind = type(layer)
    if kind.__name__ not in PLAIN_LAYERS or not kind.__module__.startswith("transformers.models."):
        return False
    attention: Any = layer.self_attn
    linears = _linears(layer)
    return (
        all(type(linear) in (nn.Linear, LoraLinear) for linear in linears)
        and len({linear.bias is not None for linear in linears[:3]}) == 1
        and all(linear.bias is None for linear in linears[3:])
        and attention.config.hidden_act in ("silu", "swish")
        and attention.head_dim % 2 == 0
        and (attention.config.rope_parameters or {}).get("partial_rotary_factor", 1.0) == 1.0
    )


def _linears(layer: nn.Module) -> list[nn.Linear]:
    """The seven linear layers of a decoder layer, in the order of `_LINEARS`."""
    return [getattr(getattr(layer, part), name) for part, names in _LINEARS.items() for name in names]


def _matrices(linears: list[nn.Linear]) -> list[Tensor | None]:
    """A and B of each layer, None twice without an adapter or while it is switched off."""
    each = (linear.matrices if isinstance(linear, LoraLinear) else None for linear in linears)
    return [matrix for pair in each for matrix in pair or (None, None)]


def check_float8(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UserError if `--fp8` is not supported here; called before the layers are fused."""
    if device.type != "cuda":
        raise UserError("--fp8 needs an NVIDIA GPU with units for 8-bit floats, and this run trains on a CPU: drop it")
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_CAPABILITY:
        name, found = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        raise UserError(f"--fp8 needs a GPU of compute capability 8.9 or newer, and {name} has {found}: drop it")
    if dtype != torch.bfloat16:
        raise UserError(f"--fp8 goes with --dtype bfloat16, and this run computes in {str(dtype)[6:]}: change one")
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names or is_plain(module)]
    if not layers or not all(map(is_plain, layers)):
        kinds = ", ".join(sorted(name.removesuffix("DecoderLayer") for name in PLAIN_LAYERS))
        raise UserError(
            f"--fp8 is for models with the layers of {kinds}, and this is a {type(model).__name__}: drop it"
        )
    for name, parameter in layers[0].named_parameters():
        if parameter.ndim == 2 and any(size % FLOAT8_MULTIPLE for size in parameter.shape):
            sides = " x ".join(map(str, parameter.shape))
            raise UserError(f"--fp8 needs matrices whose sides are multiples of 16, and {name} is {sides}: drop it")
