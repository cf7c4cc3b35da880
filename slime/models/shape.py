"""Sizes of a model, read from its folder alone: config.json and the headers of the weight files.

Invariant: reading a shape never fails on an unknown model; unknown values are None. Parameter counts are exact for the
families named here (a test compares them with transformers), and absent for others. Activation bytes are the tensors
that autograd saves for transformers' decoder layers and slime's packed attention; they are checked against a real
training step (`benchmarks/training_memory.py`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from slime.errors import UserError
from slime.models.folder import read_safetensors_header
from slime.storage.json_types import JsonObject

GATED_DELTA_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
"""Three of four layers are gated delta nets; the attention of the other layers gates its output."""
FOUR_NORM_FAMILIES = ("gemma2", "gemma3", "gemma3_text", "glm4")
HEAD_NORM_FAMILIES = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text", *GATED_DELTA_FAMILIES)
WIDE_NORM_FAMILIES = ("olmo2", "olmo3", "minimax_m2")
_QKV_BIAS_FAMILIES = ("qwen2", "qwen2_moe", "mimo")
_FLAGGED_QKV_BIAS_FAMILIES = ("glm4", "glm4_moe")
_ALWAYS_BIASED = ("gpt_oss",)
_GATED_SHARED_EXPERT = ("qwen2_moe", *GATED_DELTA_FAMILIES)
_LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa")
_PLAIN_FAMILIES = ("llama", "mistral", "mixtral", "gemma", "phi3", "granite", "smollm3", "glm4_moe", *_LATENT_FAMILIES)
_TIED_BY_DEFAULT = ("smollm3", "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "gpt2")
_COUNTED_FAMILIES = frozenset(
    FOUR_NORM_FAMILIES + HEAD_NORM_FAMILIES + WIDE_NORM_FAMILIES + _QKV_BIAS_FAMILIES + _ALWAYS_BIASED + _PLAIN_FAMILIES
)


BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that determine memory and compute; None if the config does not have them."""

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
    """Layers that keep a KV cache (fewer than all layers in hybrid models)."""
    counted_parameters: int | None = None
    """By the formula of a known family, else by the headers of the weight files."""
    attention_weights_per_layer: int | None = None
    is_latent: bool = False
    """Keys and values come from a latent (MLA)."""
    has_head_norms: bool = False
    """Queries and keys are normalised."""
    norms_per_layer: int = 2

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelShape:
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            config = {}
        shape = cls.from_config(config if isinstance(config, dict) else {})
        if shape.counted_parameters is None:
            stored: dict[str, list[int]] = {}
            for file in sorted(folder.glob("*.safetensors")):
                stored.update(tensor_shapes(file))
            if shape.tied_embeddings:
                stored.pop("lm_head.weight", None)
            count = sum(math.prod(size) for size in stored.values()) if stored else None
            shape = dataclasses.replace(shape, counted_parameters=count)
        return shape

    @classmethod
    def from_config(cls, config: JsonObject) -> ModelShape:
        """The shape that a config.json describes, under any of the names that families use for a size; of the text
        config for a multimodal model."""
        text = config.get("text_config")
        config = {**config, **text} if isinstance(text, dict) else config
        family, tied = str(config.get("model_type", "unknown")), config.get("tie_word_embeddings")
        hidden = _number(config, "hidden_size", "n_embd", "d_model")
        heads = _number(config, "num_attention_heads", "n_head", "n_heads")
        head_dim = _number(config, "head_dim")
        experts = _number(config, "num_experts", "n_routed_experts", "num_local_experts")
        expert_ffn = _number(config, "moe_intermediate_size") or (
            _number(config, "intermediate_size") if experts else None
        )
        shared_ffn = _number(config, "shared_expert_intermediate_size")
        shape = ModelShape(
            model_type=family,
            num_layers=_number(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=_number(config, "num_key_value_heads", "num_kv_heads") or heads,
            head_dim=hidden // heads if head_dim is None and hidden is not None and heads else head_dim,
            ffn_size=_number(config, "intermediate_size", "ffn_dim", "n_inner"),
            vocab_size=_number(config, "vocab_size"),
            tied_embeddings=tied if isinstance(tied, bool) else family in _TIED_BY_DEFAULT,
            max_context=_number(config, "max_position_embeddings", "n_positions"),
            num_experts=experts,
            experts_per_token=_number(config, "num_experts_per_tok", "top_k_experts") if experts else None,
            expert_ffn_size=expert_ffn,
            shared_expert_ffn_size=(
                _size(config, "n_shared_experts") * (expert_ffn or 0) if shared_ffn is None else shared_ffn
            ),
            has_head_norms=family in (*HEAD_NORM_FAMILIES, *WIDE_NORM_FAMILIES),
            norms_per_layer=4 if family in FOUR_NORM_FAMILIES else 2,
        )
        shape = dataclasses.replace(
            shape,
            num_moe_layers=_count_moe_layers(config, shape),
            num_attention_layers=_count_attention_layers(config, shape),
            attention_weights_per_layer=_attention_weights(config, shape),
        )
        shape = dataclasses.replace(shape, counted_parameters=_count_parameters(config, shape))
        if _number(config, "kv_lora_rank") is None:
            return shape
        # latent keys and values are cached expanded; a head's average width is used for both
        width = _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim") + _size(config, "v_head_dim")
        return dataclasses.replace(shape, num_kv_heads=shape.num_heads, head_dim=width // 2, is_latent=True)

    @property
    def num_parameters(self) -> int | None:
        """The number of all parameters, tied ones once."""
        return self.counted_parameters

    @property
    def active_parameters(self) -> int | None:
        """The parameters that process one token: all except the experts to which it is not routed."""
        if self.num_parameters is None:
            return None
        idle = (self.num_experts or 0) - (self.experts_per_token or 0)
        return self.num_parameters - self.num_moe_layers * idle * 3 * (self.hidden_size or 0) * (
            self.expert_ffn_size or 0
        )

    @property
    def head_parameters(self) -> int | None:
        """Parameters of the output layer, which is also the embedding if they are tied."""
        return None if self.vocab_size is None or self.hidden_size is None else self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int | None:
        """Parameters outside the layers: embedding, last norm, output layer."""
        head = self.head_parameters
        return None if head is None else head * (1 if self.tied_embeddings else 2) + (self.hidden_size or 0)

    @property
    def layer_parameters(self) -> int | None:
        """Parameters of the largest layer."""
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


def _number(config: JsonObject, *names: str) -> int | None:
    """The value of the first of these fields that is an integer."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _size(config: JsonObject, name: str) -> int:
    return _number(config, name) or 0


def _count_moe_layers(config: JsonObject, shape: ModelShape) -> int:
    if not shape.num_experts:
        return 0
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return kinds.count("sparse")
    dense_only = config.get("mlp_only_layers") or []
    step, first = _number(config, "decoder_sparse_step") or 1, _size(config, "first_k_dense_replace")
    return sum(i >= first and i not in dense_only and (i + 1) % step == 0 for i in range(shape.num_layers or 0))


def _count_attention_layers(config: JsonObject, shape: ModelShape) -> int | None:
    """The number of layers that keep a KV cache."""
    kinds, every = config.get("layer_types"), _number(config, "full_attention_interval")
    if isinstance(kinds, list) and kinds:
        return sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
    if every and shape.model_type in GATED_DELTA_FAMILIES and shape.num_layers is not None:
        return shape.num_layers // every
    return shape.num_layers


def _attention_weights(config: JsonObject, shape: ModelShape) -> int | None:
    """The number of elements in the matrices of one attention layer."""
    hidden, heads, kv_heads, head_dim = shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim
    if hidden is None or heads is None or kv_heads is None or head_dim is None:
        return None
    latent = _number(config, "kv_lora_rank")
    if latent is None:
        queries = 3 if shape.model_type in GATED_DELTA_FAMILIES else 2
        return hidden * head_dim * (queries * heads + 2 * kv_heads)
    rope, nope, value = (_size(config, name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    rank, query_out = _number(config, "q_lora_rank"), heads * (nope + rope)
    query = hidden * query_out if rank is None else rank * (hidden + query_out)
    latents = hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    index_heads, index_width = _size(config, "index_n_heads"), _size(config, "index_head_dim")
    indexer = (rank or 0) * index_heads * index_width + hidden * (index_width + index_heads)
    return query + latents + indexer


def _count_parameters(config: JsonObject, shape: ModelShape) -> int | None:
    """The number of all parameters, tied ones once; None for unknown families."""
    family, layers, moe_layers = shape.model_type, shape.num_layers, shape.num_moe_layers
    hidden, vocab, attention = shape.hidden_size, shape.vocab_size, shape.attention_weights_per_layer
    if family not in _COUNTED_FAMILIES or layers is None or hidden is None or vocab is None:
        return None
    ffn = shape.ffn_size if moe_layers < layers else shape.ffn_size or 0
    if ffn is None or attention is None:
        return None
    linear = layers - (shape.num_attention_layers or 0) if family in GATED_DELTA_FAMILIES else 0
    mixing = (layers - linear) * (attention + _attention_extra_parameters(config, shape))
    if linear:  # gated delta nets: projections, convolution, decay and step biases, norm of the output
        value_heads, value_dim = _size(config, "linear_num_value_heads"), _size(config, "linear_value_head_dim")
        keys = _size(config, "linear_num_key_heads") * _size(config, "linear_key_head_dim")
        values = value_heads * value_dim
        projections = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
        convolution = (2 * keys + values) * _size(config, "linear_conv_kernel_dim")
        mixing += linear * (projections + convolution + 2 * value_heads + value_dim)
    norms = layers * hidden * shape.norms_per_layer
    dense = 3 * hidden * ffn + (2 * ffn + hidden if config.get("mlp_bias") is True else 0)
    width = shape.expert_ffn_size or 0
    expert = 3 * hidden * width + hidden + (2 * width + hidden + 1 if family == "gpt_oss" else 0)  # with its router row
    shared = 3 * hidden * shape.shared_expert_ffn_size + (hidden if family in _GATED_SHARED_EXPERT else 0)
    feed_forward = (layers - moe_layers) * dense + moe_layers * ((shape.num_experts or 0) * expert + shared)
    return mixing + norms + feed_forward + vocab * hidden * (1 if shape.tied_embeddings else 2) + hidden


def _attention_extra_parameters(config: JsonObject, shape: ModelShape) -> int:
    """Biases, norms and sinks of one attention layer."""
    hidden, head_dim, heads = shape.hidden_size or 0, shape.head_dim or 0, shape.num_heads or 0
    latent = _number(config, "kv_lora_rank")
    if latent is not None:
        return latent + _size(config, "q_lora_rank") + 2 * _size(config, "index_head_dim")
    query, key = heads * head_dim, (shape.num_kv_heads or 0) * head_dim
    family, extra = shape.model_type, 0
    if family in _QKV_BIAS_FAMILIES:
        extra += query + 2 * key
    elif config.get("attention_bias") is True or family in _ALWAYS_BIASED:
        extra += query + 2 * key + (0 if family in _FLAGGED_QKV_BIAS_FAMILIES else hidden)
    if family in HEAD_NORM_FAMILIES or (family == "glm4_moe" and config.get("use_qk_norm") is True):
        extra += 2 * head_dim
    if family in WIDE_NORM_FAMILIES:
        extra += query + key
    return extra + (heads if family == "gpt_oss" else 0)


def check_context_parallel(heads: int | None, size: int, model: str = "the model") -> None:
    """Raise UserError unless the context-parallel size divides the number of attention heads."""
    if heads is not None and heads % size:
        fitting = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise UserError(
            f"--context-parallel-size {size} does not divide the {heads} attention heads of {model}: "
            f"use one of {fitting}"
        )


def count_parameters(folder: str | Path) -> int | None:
    """The number of parameters of the model in a folder, tied ones once; None if it is unknown."""
    return ModelShape.from_folder(folder).num_parameters


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of a safetensors file's tensors, by its header; empty if the header is not readable."""
    try:
        header, _, _ = read_safetensors_header(file)
    except (OSError, ValueError):
        return {}
    return {name: entry["shape"] for name, entry in header.items() if "shape" in entry}


_FLOAT32_BYTES = 4  # bytes of float32, in which normalisations and, on a CPU, attention compute


def layer_bytes(
    shape: ModelShape,
    *,
    dtype: str,
    on_gpu: bool,
    compiled: bool = False,
    fused: bool = False,
    frozen_norms: bool = False,
) -> int | None:
    """Bytes that one decoder layer keeps per token for the backward pass; the largest layer of a model with experts.

    `compiled`, `fused`: by torch.compile, or into a few kernels of our own (`train/backends/fsdp/fused`).
    `frozen_norms`: the weights of normalisations are not trained, so their inputs are not kept.
    """
    if shape.hidden_size is None or shape.num_heads is None or shape.num_kv_heads is None or shape.head_dim is None:
        return None
    size = BYTES_PER_ELEMENT[dtype]
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    narrow = shape.ffn_size or 4 * hidden
    if shape.num_moe_layers:  # each expert of a token has a copy of its input and output
        per_token = (shape.experts_per_token or 1) * (shape.expert_ffn_size or narrow) + shape.shared_expert_ffn_size
        routed = 2 * hidden * (shape.experts_per_token or 1)
    else:
        per_token, routed = narrow, 0
    if fused:  # both norms with their inputs; heads before and after rotation, attention output; gate and up
        return size * (4 * hidden + 3 * queries + 3 * keys + 2 * per_token)
    if compiled:  # cheap results are recomputed, except the inputs of matrices, which their gradients need
        normed = queries + keys if shape.has_head_norms else 0
        return size * (4 * hidden + normed + 2 * queries + 2 * keys + 3 * per_token + routed)
    scaled = 0 if frozen_norms else size
    norms = (
        shape.norms_per_layer * (_FLOAT32_BYTES + scaled + size) * hidden
    )  # input in float32, normalised, times its weight
    normed = (_FLOAT32_BYTES + scaled) * (queries + keys) if shape.has_head_norms else 0
    attention = (size if on_gpu else _FLOAT32_BYTES) * (2 * queries + 2 * keys)
    output = 0 if on_gpu else size * queries  # attention on a CPU copies the input of the output projection
    return norms + normed + attention + output + size * (4 * per_token + routed)


def root_bytes(shape: ModelShape, *, dtype: str) -> int | None:
    """Bytes kept per token outside the layers: the last normalisation and the input of the output layer."""
    if shape.hidden_size is None:
        return None
    return (_FLOAT32_BYTES + 3 * BYTES_PER_ELEMENT[dtype]) * shape.hidden_size


def layer_input_bytes(shape: ModelShape, *, dtype: str) -> int | None:
    """Bytes that a layer keeps per token if its activations are recomputed."""
    return None if shape.hidden_size is None else BYTES_PER_ELEMENT[dtype] * shape.hidden_size
