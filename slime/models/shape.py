"""Sizes of a model read from its folder alone: config.json and the headers of the weight files, nothing imported.

Invariant: reading a shape never fails on a model it does not know; what cannot be told is None.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path
from typing import Any

from slime.errors import UserError
from slime.models.counting import FOUR_NORM_FAMILIES, HEAD_NORM_FAMILIES, WIDE_NORM_FAMILIES, ConfigNumbers
from slime.models.counting import count_parameters as count_weights

BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers that decide memory and work; None where the config does not tell."""

    model_type: str
    num_layers: int | None
    hidden_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    ffn_size: int | None
    vocab_size: int | None
    tied_embeddings: bool
    max_context: int | None
    num_experts: int | None = None
    experts_per_token: int | None = None
    expert_ffn_size: int | None = None
    shared_expert_ffn_size: int = 0
    num_moe_layers: int = 0
    num_attention_layers: int | None = None
    """Layers that keep a KV cache (hybrid models have fewer than layers)."""
    counted_parameters: int | None = None
    """From the formula of a known family, else from the headers of the weight files."""
    attention_weights_per_layer: int | None = None
    is_latent: bool = False
    """Keys and values come from a latent (MLA)."""
    has_head_norms: bool = False
    """Queries and keys are normalised."""
    norms_per_layer: int = 2

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelShape:
        """The shape of the model in a Hugging Face folder."""
        folder = Path(folder)
        config = _read_json(folder / "config.json")
        shape = cls.from_config(config)
        if shape.counted_parameters is None:
            stored = _parameters_on_disk(folder, skip_head=shape.tied_embeddings)
            shape = dataclasses.replace(shape, counted_parameters=stored)
        return shape

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelShape:
        """The shape a config.json describes; of a multimodal model the text part."""
        return _shape(ConfigNumbers(config))

    @property
    def num_parameters(self) -> int | None:
        """All parameters, tied ones once."""
        return self.counted_parameters

    @property
    def active_parameters(self) -> int | None:
        """Those that one token meets: all but the experts it is not sent to."""
        if self.num_parameters is None:
            return None
        idle = (self.num_experts or 0) - (self.experts_per_token or 0)
        return self.num_parameters - self.num_moe_layers * idle * 3 * (self.hidden_size or 0) * (
            self.expert_ffn_size or 0
        )

    @property
    def head_parameters(self) -> int | None:
        """Of the output layer, which is the embedding too where they are tied."""
        return None if self.vocab_size is None or self.hidden_size is None else self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int | None:
        """Those outside the layers: embedding, last norm, output layer."""
        head = self.head_parameters
        return None if head is None else head * (1 if self.tied_embeddings else 2) + (self.hidden_size or 0)

    @property
    def layer_parameters(self) -> int | None:
        """Of the largest layer."""
        total, root, layers = self.num_parameters, self.root_parameters, self.num_layers
        if total is None or root is None or not layers:
            return None
        dense = layers - self.num_moe_layers
        if not self.num_moe_layers or not dense:
            return max(total - root, 0) // layers
        narrow = (self.attention_weights_per_layer or 0) + 3 * (self.hidden_size or 0) * (self.ffn_size or 0)
        return max(total - root - dense * narrow, 0) // self.num_moe_layers

    def kv_bytes_per_token(self, dtype: str) -> int | None:
        """Bytes one token takes in the KV cache of the whole model."""
        layers = self.num_attention_layers
        if layers is None or self.num_kv_heads is None or self.head_dim is None:
            return None
        return 2 * layers * self.num_kv_heads * self.head_dim * BYTES_PER_ELEMENT[dtype]

    def flops_per_token(self, context: int) -> int | None:
        """Forward FLOPs of one token that attends to `context` tokens; training takes three times as many."""
        layers, hidden, vocab = self.num_layers, self.hidden_size, self.vocab_size
        if layers is None or hidden is None or vocab is None or self.num_heads is None or self.head_dim is None:
            return None
        if self.attention_weights_per_layer is None or (self.ffn_size is None and not self.num_moe_layers):
            return None
        dense = 3 * hidden * (self.ffn_size or 0) * (layers - self.num_moe_layers)
        experts = (self.experts_per_token or 0) * (self.expert_ffn_size or 0) + self.shared_expert_ffn_size
        sparse = self.num_moe_layers * (3 * hidden * experts + hidden * (self.num_experts or 0))
        weights = layers * self.attention_weights_per_layer + dense + sparse + hidden * vocab
        scores = 2 * (self.num_attention_layers or layers) * self.num_heads * self.head_dim * context
        return 2 * (weights + scores)


def _shape(numbers: ConfigNumbers) -> ModelShape:
    family = numbers.family
    shape = ModelShape(
        model_type=family,
        num_layers=numbers.layers,
        hidden_size=numbers.hidden,
        num_heads=numbers.heads,
        num_kv_heads=numbers.kv_heads,
        head_dim=numbers.head_dim,
        ffn_size=numbers.ffn,
        vocab_size=numbers.number("vocab_size"),
        tied_embeddings=numbers.tied,
        max_context=numbers.number("max_position_embeddings", "n_positions"),
        num_experts=numbers.experts,
        experts_per_token=numbers.number("num_experts_per_tok", "top_k_experts") if numbers.experts else None,
        expert_ffn_size=numbers.expert_ffn,
        shared_expert_ffn_size=numbers.shared_expert_ffn,
        num_moe_layers=numbers.moe_layers,
        num_attention_layers=numbers.attention_layers,
        has_head_norms=family in (*HEAD_NORM_FAMILIES, *WIDE_NORM_FAMILIES),
        norms_per_layer=4 if family in FOUR_NORM_FAMILIES else 2,
        attention_weights_per_layer=numbers.attention_weights,
        counted_parameters=count_weights(numbers),
    )
    return _with_latents(shape, numbers) if numbers.number("kv_lora_rank") is not None else shape


def _with_latents(shape: ModelShape, numbers: ConfigNumbers) -> ModelShape:
    """Keys and values are cached expanded; a head's average width stands for both."""
    width = numbers.size("qk_nope_head_dim") + numbers.size("qk_rope_head_dim") + numbers.size("v_head_dim")
    return dataclasses.replace(shape, num_kv_heads=shape.num_heads, head_dim=width // 2, is_latent=True)


def check_context_parallel(heads: int | None, size: int, model: str = "the model") -> None:
    """Processes that share sequences share the attention heads evenly."""
    if heads is not None and heads % size:
        fitting = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise UserError(
            f"--context-parallel-size {size} does not divide the {heads} attention heads of {model}: "
            f"use one of {fitting}"
        )


def count_parameters(folder: str | Path) -> int | None:
    """The parameters of the model in a folder, tied ones once; None where that cannot be told."""
    return ModelShape.from_folder(folder).num_parameters


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _parameters_on_disk(folder: Path, *, skip_head: bool) -> int | None:
    """Elements in the safetensors files, from their headers; None where there are none."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes.update(tensor_shapes(file))
    if skip_head:
        shapes.pop("lm_head.weight", None)
    return sum(math.prod(shape) for shape in shapes.values()) if shapes else None


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """The tensors of a safetensors file, from its header; none where it has no readable one."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > 100 * 2**20:
                return {}
            header = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error):
        return {}
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__" and "shape" in entry}
