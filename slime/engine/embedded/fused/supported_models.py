"""Models that the fused kernels support, described by the fields of config.json; no model code.

All of them use the same block, x + attention(norm(x)) and then x + swiglu(norm(x)). They differ in options: a norm of
each query and key head, biases, a window, the scaling of rotary frequencies, experts, a tied output head.
Invariant: a config with a feature that the kernels do not support is refused (`NotFused`) with the reason, and its
model runs through transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime.engine.embedded.fused.rope import NotFused, Rope
from slime.models.folder import SAME_CODE
from slime.storage.json_types import JsonMapping


@dataclass(frozen=True)
class _Family:
    """Options of a model family, and the config fields that it reads."""

    qk_norm: bool = False
    qkv_bias: bool = False  # always, independent of the config
    has_attention_bias: bool = False  # reads `attention_bias`: of q, k, v and the output
    has_mlp_bias: bool = False  # reads `mlp_bias`
    default_head_dim: int | None = None  # None: the hidden size divided by the heads
    default_window: int | None = None  # without `sliding_window` in the config
    has_window_switch: bool = False  # windows only with `use_sliding_window`, in the layers from `max_window_layers` on
    has_experts: bool = False  # in the layers that the config does not make dense; windows are then in all layers


_FAMILIES = {
    "qwen3": _Family(qk_norm=True, has_attention_bias=True, default_head_dim=128, has_window_switch=True),
    "qwen3_moe": _Family(qk_norm=True, has_attention_bias=True, has_window_switch=True, has_experts=True),
    "qwen2": _Family(qkv_bias=True, has_window_switch=True),
    "llama": _Family(has_attention_bias=True, has_mlp_bias=True),
    "mistral": _Family(default_window=4096),
}


@dataclass(frozen=True)
class ExpertSpec:
    """Experts of the sparse layers: each token uses `topk` of `count`, each a SwiGLU of `width`."""

    count: int
    topk: int
    width: int
    normalised: bool  # the weights of a token's experts sum to one


@dataclass(frozen=True)
class FusedModelSpec:
    """Configuration of a fused model: sizes, options, windows, rotary embedding."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    windows: tuple[int, ...]  # by layer; 0: full attention
    rope: Rope
    experts: ExpertSpec | None = None
    sparse: tuple[bool, ...] = ()  # by layer

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def head_name(self) -> str:
        return EMBEDDING if self.tied else "lm_head.weight"


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"


def layer_tensor_names(layer: int, projection: str, kind: str = "weight") -> list[str]:
    """Names, in the model folder, of the tensors that one fused product of a layer reads, in memory order."""
    parts = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "norm": ("input_layernorm",),
        "mlp_norm": ("post_attention_layernorm",),
        "q_norm": ("self_attn.q_norm",),
        "k_norm": ("self_attn.k_norm",),
        "router": ("mlp.gate",),
    }[projection]
    return [f"model.layers.{layer}.{part}.{kind}" for part in parts]


def expert_tensor_names(layer: int, count: int, projection: str) -> list[str]:
    """Names of the expert tensors of a layer, in memory order: all of one expert before the next."""
    parts = ("gate_proj", "up_proj") if projection == "gate_up" else ("down_proj",)
    return [f"model.layers.{layer}.mlp.experts.{e}.{part}.weight" for e in range(count) for part in parts]


def block_of(facts: JsonMapping) -> FusedModelSpec:
    """Return the configuration of a fused model from the fields of its (text) config; raises NotFused."""
    model_type = str(facts.get("model_type"))
    family = _FAMILIES.get(SAME_CODE.get(model_type, model_type))
    if family is None:
        raise NotFused(f"no fused kernels for {model_type} models")
    if facts.get("hidden_act", "silu") != "silu":
        raise NotFused(f"its activation {facts['hidden_act']!r} is not supported")
    layers, heads, hidden = (int(facts[name]) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    head_dim = int(facts.get("head_dim") or family.default_head_dim or hidden // heads)
    kv_heads = int(facts.get("num_key_value_heads") or heads)
    if heads % kv_heads or head_dim % 2 or head_dim > 256:
        raise NotFused(f"{heads} query heads and {kv_heads} key heads of dimension {head_dim} are not supported")
    attention_bias = family.has_attention_bias and bool(facts.get("attention_bias"))
    block = FusedModelSpec(
        model_type=model_type,
        hidden=hidden,
        intermediate=int(facts["intermediate_size"]),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=int(facts["vocab_size"]),
        eps=float(facts.get("rms_norm_eps", 1e-6)),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family.has_mlp_bias and bool(facts.get("mlp_bias")),
        tied=bool(facts.get("tie_word_embeddings", False)),
        windows=_windows(family, facts, layers),
        rope=Rope.from_facts(facts),
        sparse=(False,) * layers,
    )
    if not family.has_experts:
        return block
    count = facts["num_experts"] if "num_experts" in facts else facts["num_local_experts"]
    topk, width = int(facts["num_experts_per_tok"]), int(facts["moe_intermediate_size"])
    experts = ExpertSpec(int(count), topk, width, bool(facts.get("norm_topk_prob", False)))
    dense, step = facts.get("mlp_only_layers") or [], int(facts.get("decoder_sparse_step", 1))
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    return replace(block, experts=experts, sparse=sparse)


def _windows(family: _Family, facts: JsonMapping, layers: int) -> tuple[int, ...]:
    """Return the window of each layer; 0: full attention."""
    window = facts.get("sliding_window", family.default_window)
    if family.has_window_switch:
        if not facts.get("use_sliding_window"):
            return (0,) * layers
        kinds = facts.get("layer_types")
        if kinds is not None and not family.has_experts:
            return tuple(int(window or 0) if kind == "sliding_attention" else 0 for kind in kinds)
        first = 0 if family.has_experts else int(facts.get("max_window_layers", 28))
        return tuple(int(window or 0) if layer >= first else 0 for layer in range(layers))
    if family.default_window is None:
        return (0,) * layers
    return (int(window or 0),) * layers


def together(block: FusedModelSpec) -> list[list[str]]:
    """Groups of tensor names that must be contiguous in memory, so that one product can read them."""
    groups = []
    for layer in range(block.layers):
        groups.append(layer_tensor_names(layer, "qkv"))
        if block.experts is not None and block.sparse[layer]:
            groups += [expert_tensor_names(layer, block.experts.count, part) for part in ("gate_up", "down")]
        else:
            groups.append(layer_tensor_names(layer, "gate_up"))
        if block.qkv_bias:
            groups.append(layer_tensor_names(layer, "qkv", "bias"))
        if block.mlp_bias:
            groups.append(layer_tensor_names(layer, "gate_up", "bias"))
    return groups


def tensor_shapes(block: FusedModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in a folder of this model, by name."""
    hidden, inner, dim = block.hidden, block.intermediate, block.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (block.vocab, hidden), FINAL_NORM: (hidden,)}
    shapes[block.head_name] = (block.vocab, hidden)
    queries, keys = block.heads * dim, block.kv_heads * dim
    products = {
        "qkv": ((queries, keys, keys), hidden, block.qkv_bias),
        "out": ((hidden,), queries, block.out_bias),
        "gate_up": ((inner, inner), hidden, block.mlp_bias),
        "down": ((hidden,), inner, block.mlp_bias),
    }
    for layer in range(block.layers):
        sparse = block.experts if block.sparse[layer] else None
        for projection, (rows, depth, has_bias) in products.items():
            if sparse is not None and projection in ("gate_up", "down"):
                continue
            for name, count in zip(layer_tensor_names(layer, projection), rows, strict=True):
                shapes[name] = (count, depth)
            if has_bias:
                shapes |= {n: (r,) for n, r in zip(layer_tensor_names(layer, projection, "bias"), rows, strict=True)}
        if sparse is not None:
            shapes[layer_tensor_names(layer, "router")[0]] = (sparse.count, hidden)
            shapes |= dict.fromkeys(expert_tensor_names(layer, sparse.count, "gate_up"), (sparse.width, hidden))
            shapes |= dict.fromkeys(expert_tensor_names(layer, sparse.count, "down"), (hidden, sparse.width))
        shapes |= {layer_tensor_names(layer, norm)[0]: (hidden,) for norm in ("norm", "mlp_norm")}
        if block.qk_norm:
            shapes |= {layer_tensor_names(layer, norm)[0]: (dim,) for norm in ("q_norm", "k_norm")}
    return shapes
