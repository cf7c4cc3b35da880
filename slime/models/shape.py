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

BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

_FOUR_NORM_FAMILIES = ("gemma2", "gemma3", "gemma3_text", "glm4")
_HEAD_NORM_FAMILIES = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
_WIDE_NORM_FAMILIES = ("olmo2", "olmo3")
_QKV_BIAS_FAMILIES = ("qwen2", "qwen2_moe")
_FLAGGED_QKV_BIAS_FAMILIES = ("glm4", "glm4_moe")
_PLAIN_FAMILIES = ("llama", "mistral", "mixtral", "gemma", "phi3", "granite", "smollm3", "deepseek_v2", "deepseek_v3")
_TIED_BY_DEFAULT = ("smollm3", "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "gpt2")
_COUNTED_FAMILIES = frozenset(
    _FOUR_NORM_FAMILIES + _HEAD_NORM_FAMILIES + _WIDE_NORM_FAMILIES + _QKV_BIAS_FAMILIES + _PLAIN_FAMILIES
)


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
        reader = _ConfigReader(config)
        shape = reader.shape()
        return dataclasses.replace(shape, counted_parameters=reader.parameters(shape))

    @property
    def num_parameters(self) -> int | None:
        """All parameters, tied ones once."""
        return self.counted_parameters

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


class _ConfigReader:
    """Reads facts from a config.json under the names the families use for them."""

    def __init__(self, config: dict[str, Any]) -> None:
        text = config.get("text_config")
        self.config: dict[str, Any] = {**config, **text} if isinstance(text, dict) else config
        self.family = str(self.config.get("model_type", "unknown"))
        tied = self.config.get("tie_word_embeddings")
        self.tied = tied if isinstance(tied, bool) else self.family in _TIED_BY_DEFAULT

    def number(self, *names: str) -> int | None:
        for name in names:
            value = self.config.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    def shape(self) -> ModelShape:
        layers = self.number("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        hidden = self.number("hidden_size", "n_embd", "d_model")
        heads = self.number("num_attention_heads", "n_head", "n_heads")
        head_dim = self.number("head_dim")
        if head_dim is None and hidden is not None and heads:
            head_dim = hidden // heads
        kv_heads = self.number("num_key_value_heads", "num_kv_heads") or heads
        experts = self.number("num_experts", "n_routed_experts", "num_local_experts")
        expert_ffn = self.number("moe_intermediate_size") or (self.number("intermediate_size") if experts else None)
        shape = ModelShape(
            model_type=self.family,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=self.number("intermediate_size", "ffn_dim", "n_inner"),
            vocab_size=self.number("vocab_size"),
            tied_embeddings=self.tied,
            max_context=self.number("max_position_embeddings", "n_positions"),
            num_experts=experts,
            experts_per_token=self.number("num_experts_per_tok", "top_k_experts") if experts else None,
            expert_ffn_size=expert_ffn,
            shared_expert_ffn_size=self._shared_expert_ffn(expert_ffn or 0),
            num_moe_layers=self._moe_layers(layers or 0) if experts else 0,
            num_attention_layers=self._attention_layers(layers),
            has_head_norms=self.family in (*_HEAD_NORM_FAMILIES, *_WIDE_NORM_FAMILIES),
            norms_per_layer=4 if self.family in _FOUR_NORM_FAMILIES else 2,
        )
        return self._with_attention(shape)

    def _with_attention(self, shape: ModelShape) -> ModelShape:
        hidden, heads, kv_heads, head_dim = shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim
        if hidden is None or heads is None or kv_heads is None or head_dim is None:
            return shape
        latent = self.number("kv_lora_rank")
        if latent is None:
            weights = hidden * head_dim * (2 * heads + 2 * kv_heads)
            return dataclasses.replace(shape, attention_weights_per_layer=weights)
        rope, nope = self.number("qk_rope_head_dim") or 0, self.number("qk_nope_head_dim") or 0
        value, query_rank = self.number("v_head_dim") or 0, self.number("q_lora_rank")
        query_out = heads * (nope + rope)
        query = hidden * query_out if query_rank is None else query_rank * (hidden + query_out)
        weights = query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        # keys and values are cached expanded; a head's average width stands for both
        return dataclasses.replace(
            shape,
            attention_weights_per_layer=weights,
            num_kv_heads=heads,
            head_dim=(nope + rope + value) // 2,
            is_latent=True,
        )

    def _shared_expert_ffn(self, expert_ffn: int) -> int:
        explicit = self.number("shared_expert_intermediate_size")
        return explicit if explicit is not None else (self.number("n_shared_experts") or 0) * expert_ffn

    def _moe_layers(self, layers: int) -> int:
        dense_only = self.config.get("mlp_only_layers") or []
        step = self.number("decoder_sparse_step") or 1
        first = self.number("first_k_dense_replace") or 0
        return sum(i >= first and i not in dense_only and (i + 1) % step == 0 for i in range(layers))

    def _attention_layers(self, layers: int | None) -> int | None:
        kinds = self.config.get("layer_types")
        if isinstance(kinds, list) and kinds:
            return sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
        return layers

    def parameters(self, shape: ModelShape) -> int | None:
        """The exact count for families whose layers are known, else None."""
        layers, hidden, vocab, ffn = shape.num_layers, shape.hidden_size, shape.vocab_size, shape.ffn_size
        attention = shape.attention_weights_per_layer
        if self.family not in _COUNTED_FAMILIES or layers is None or hidden is None or vocab is None:
            return None
        if ffn is None or attention is None:
            return None
        dense_ffn = 3 * hidden * ffn + (2 * ffn + hidden if self.config.get("mlp_bias") is True else 0)
        per_layer = attention + self._attention_biases_and_norms(shape)
        per_layer += hidden * (4 if self.family in _FOUR_NORM_FAMILIES else 2)
        feed_forward = (layers - shape.num_moe_layers) * dense_ffn + shape.num_moe_layers * self._sparse_ffn(shape)
        embeddings = vocab * hidden * (1 if self.tied else 2)
        return layers * per_layer + feed_forward + embeddings + hidden

    def _attention_biases_and_norms(self, shape: ModelShape) -> int:
        hidden, head_dim = shape.hidden_size or 0, shape.head_dim or 0
        latent = self.number("kv_lora_rank")
        if latent is not None:
            return latent + (self.number("q_lora_rank") or 0)
        query, key = (shape.num_heads or 0) * head_dim, (shape.num_kv_heads or 0) * head_dim
        extra = 0
        if self.family in _QKV_BIAS_FAMILIES:
            extra += query + 2 * key
        elif self.config.get("attention_bias") is True:
            extra += query + 2 * key + (0 if self.family in _FLAGGED_QKV_BIAS_FAMILIES else hidden)
        if self.family in _HEAD_NORM_FAMILIES:
            extra += 2 * head_dim
        if self.family in _WIDE_NORM_FAMILIES:
            extra += query + key
        return extra

    def _sparse_ffn(self, shape: ModelShape) -> int:
        hidden, experts = shape.hidden_size or 0, shape.num_experts or 0
        shared = 3 * hidden * shape.shared_expert_ffn_size
        gate = hidden if self.family == "qwen2_moe" else 0
        return experts * (3 * hidden * (shape.expert_ffn_size or 0) + hidden) + shared + gate


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
