"""How many parameters a config.json describes, told layer by layer.

Invariant: a count is exact for the families named here (a test compares them with transformers), and absent for others.
"""

from __future__ import annotations

from typing import Any

GATED_DELTA_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
"""Three of four layers are gated delta nets; the attention of the others gates its output."""
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


class ConfigNumbers:
    """Facts of a config.json under the names the families use for them; of a multimodal model the text part."""

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

    def size(self, *names: str) -> int:
        """A number that counts as nothing where it is not told."""
        return self.number(*names) or 0

    @property
    def layers(self) -> int | None:
        return self.number("num_hidden_layers", "n_layer", "num_layers", "n_layers")

    @property
    def hidden(self) -> int | None:
        return self.number("hidden_size", "n_embd", "d_model")

    @property
    def heads(self) -> int | None:
        return self.number("num_attention_heads", "n_head", "n_heads")

    @property
    def kv_heads(self) -> int | None:
        return self.number("num_key_value_heads", "num_kv_heads") or self.heads

    @property
    def head_dim(self) -> int | None:
        explicit = self.number("head_dim")
        if explicit is None and self.hidden is not None and self.heads:
            return self.hidden // self.heads
        return explicit

    @property
    def ffn(self) -> int | None:
        return self.number("intermediate_size", "ffn_dim", "n_inner")

    @property
    def experts(self) -> int | None:
        return self.number("num_experts", "n_routed_experts", "num_local_experts")

    @property
    def expert_ffn(self) -> int | None:
        return self.number("moe_intermediate_size") or (self.number("intermediate_size") if self.experts else None)

    @property
    def shared_expert_ffn(self) -> int:
        explicit = self.number("shared_expert_intermediate_size")
        return explicit if explicit is not None else self.size("n_shared_experts") * (self.expert_ffn or 0)

    @property
    def moe_layers(self) -> int:
        if not self.experts:
            return 0
        kinds = self.config.get("mlp_layer_types")
        if isinstance(kinds, list):
            return kinds.count("sparse")
        dense_only = self.config.get("mlp_only_layers") or []
        step, first = self.number("decoder_sparse_step") or 1, self.size("first_k_dense_replace")
        return sum(i >= first and i not in dense_only and (i + 1) % step == 0 for i in range(self.layers or 0))

    @property
    def attention_layers(self) -> int | None:
        """Layers that keep a KV cache."""
        kinds, every = self.config.get("layer_types"), self.number("full_attention_interval")
        if isinstance(kinds, list) and kinds:
            return sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
        if every and self.family in GATED_DELTA_FAMILIES and self.layers is not None:
            return self.layers // every
        return self.layers

    @property
    def attention_weights(self) -> int | None:
        """Elements of the matrices of one attention layer."""
        hidden, heads, kv_heads, head_dim = self.hidden, self.heads, self.kv_heads, self.head_dim
        if hidden is None or heads is None or kv_heads is None or head_dim is None:
            return None
        latent = self.number("kv_lora_rank")
        if latent is None:
            queries = 3 if self.family in GATED_DELTA_FAMILIES else 2
            return hidden * head_dim * (queries * heads + 2 * kv_heads)
        rope, nope, value = self.size("qk_rope_head_dim"), self.size("qk_nope_head_dim"), self.size("v_head_dim")
        rank, query_out = self.number("q_lora_rank"), heads * (nope + rope)
        query = hidden * query_out if rank is None else rank * (hidden + query_out)
        latents = hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        return query + latents + self._indexer_weights(hidden, rank or 0)

    def _indexer_weights(self, hidden: int, rank: int) -> int:
        """What picks the keys of sparse attention."""
        heads, width = self.size("index_n_heads"), self.size("index_head_dim")
        return rank * heads * width + hidden * (width + heads)


def count_parameters(numbers: ConfigNumbers) -> int | None:
    """All parameters, tied ones once; None for families that are not known."""
    layers, hidden, vocab = numbers.layers, numbers.hidden, numbers.number("vocab_size")
    attention = numbers.attention_weights
    if numbers.family not in _COUNTED_FAMILIES or layers is None or hidden is None or vocab is None:
        return None
    ffn = numbers.ffn if numbers.moe_layers < layers else numbers.ffn or 0
    if ffn is None or attention is None:
        return None
    full = numbers.attention_layers or 0
    linear = layers - full if numbers.family in GATED_DELTA_FAMILIES else 0
    mixing = (layers - linear) * (attention + _attention_extras(numbers)) + linear * _delta_net(numbers)
    norms = layers * hidden * (4 if numbers.family in FOUR_NORM_FAMILIES else 2)
    dense = 3 * hidden * ffn + (2 * ffn + hidden if numbers.config.get("mlp_bias") is True else 0)
    feed_forward = (layers - numbers.moe_layers) * dense + numbers.moe_layers * _experts(numbers)
    return mixing + norms + feed_forward + vocab * hidden * (1 if numbers.tied else 2) + hidden


def _attention_extras(numbers: ConfigNumbers) -> int:
    """Biases, norms and sinks of one attention layer."""
    hidden, head_dim, heads = numbers.hidden or 0, numbers.head_dim or 0, numbers.heads or 0
    latent = numbers.number("kv_lora_rank")
    if latent is not None:
        return latent + numbers.size("q_lora_rank") + 2 * numbers.size("index_head_dim")
    query, key = heads * head_dim, (numbers.kv_heads or 0) * head_dim
    family, extra = numbers.family, 0
    if family in _QKV_BIAS_FAMILIES:
        extra += query + 2 * key
    elif numbers.config.get("attention_bias") is True or family in _ALWAYS_BIASED:
        extra += query + 2 * key + (0 if family in _FLAGGED_QKV_BIAS_FAMILIES else hidden)
    if family in HEAD_NORM_FAMILIES or (family == "glm4_moe" and numbers.config.get("use_qk_norm") is True):
        extra += 2 * head_dim
    if family in WIDE_NORM_FAMILIES:
        extra += query + key
    return extra + (heads if family == "gpt_oss" else 0)


def _delta_net(numbers: ConfigNumbers) -> int:
    """A gated delta net: projections, convolution, decay and step biases, norm of the output."""
    hidden, value_heads = numbers.hidden or 0, numbers.size("linear_num_value_heads")
    value_dim = numbers.size("linear_value_head_dim")
    keys = numbers.size("linear_num_key_heads") * numbers.size("linear_key_head_dim")
    values = value_heads * value_dim
    projections = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    return projections + (2 * keys + values) * numbers.size("linear_conv_kernel_dim") + 2 * value_heads + value_dim


def _experts(numbers: ConfigNumbers) -> int:
    """Experts, router and what every token passes beside them."""
    hidden, count, width = numbers.hidden or 0, numbers.experts or 0, numbers.expert_ffn or 0
    each = 3 * hidden * width + hidden
    if numbers.family == "gpt_oss":
        each += 2 * width + hidden + 1
    gate = hidden if numbers.family in _GATED_SHARED_EXPERT else 0
    return count * each + 3 * hidden * numbers.shared_expert_ffn + gate
