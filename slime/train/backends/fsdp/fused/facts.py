"""What the kernels need to know of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerFacts:
    heads: int
    kv_heads: int
    eps: float  # of the norm over the hidden states
    head_eps: float  # of those over each head
    second_eps: float  # of the norm after attention
    in_float8: bool = False  # whether products of the forward are
    lora_scale: float = 0.0  # of what adapters add, if there are any
