"""The rules that families share: embeddings, attention, feed-forward, experts."""

from __future__ import annotations

from collections.abc import Sequence

from slime.models.families.facts import HfConfig
from slime.models.families.forms import Columns, GateUp, Qkv, Rows, Vocab, Whole
from slime.models.families.reading import is_tied, kv_heads, num_experts
from slime.models.families.rules import Rule

Layers = Sequence[int]
HERE, THERE = "decoder.layers.{layer}.", "model.layers.{layer}."


def edge_rules(config: HfConfig) -> tuple[Rule, ...]:
    """Embedding, last norm and output layer; tied ones have a copy on the last stage of a pipeline."""
    tied = is_tied(config)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return (
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocab()),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Whole()),
        Rule("output_layer.weight", (head,), Vocab(), is_copy=tied),
    )


def layer_rule(megatron: str, hf: str, form: Columns | Rows | Whole, layers: Layers) -> Rule:
    return Rule(HERE + megatron, (THERE + hf,), form, tuple(layers))


def attention_rules(
    config: HfConfig,
    layers: Layers,
    *,
    has_qkv_bias: bool = False,
    has_out_bias: bool = False,
    has_head_norms: bool = False,
    is_gated: bool = False,
) -> tuple[Rule, ...]:
    """Grouped-query attention with the norm before it."""
    form, layers = Qkv(kv_heads(config), is_gated), tuple(layers)

    def qkv(kind: str) -> Rule:
        names = tuple(f"{THERE}self_attn.{part}_proj.{kind}" for part in "qkv")
        return Rule(f"{HERE}self_attention.linear_qkv.{kind}", names, form, layers)

    rules = [
        layer_rule("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", Whole(), layers),
        qkv("weight"),
        layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Rows(), layers),
    ]
    if has_qkv_bias:
        rules.append(qkv("bias"))
    if has_out_bias:
        rules.append(layer_rule("self_attention.linear_proj.bias", "self_attn.o_proj.bias", Whole(), layers))
    if has_head_norms:
        rules += [
            layer_rule(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight", Whole(), layers)
            for part in "qk"
        ]
    return tuple(rules)


def gate_up_rule(megatron: str, hf: str, layers: Layers, *, kind: str = "weight", experts: int = 0) -> Rule:
    """Gate and up projection under `hf`, as `megatron`.linear_fc1."""
    names = tuple(f"{THERE}{hf}.{part}_proj.{kind}" for part in ("gate", "up"))
    suffix = kind + ("{expert}" if experts else "")
    return Rule(f"{HERE}{megatron}.linear_fc1.{suffix}", names, GateUp(), tuple(layers), experts)


def down_rule(megatron: str, hf: str, layers: Layers, *, experts: int = 0) -> Rule:
    suffix = "weight{expert}" if experts else "weight"
    name = f"{THERE}{hf}.down_proj.weight"
    return Rule(f"{HERE}{megatron}.linear_fc2.{suffix}", (name,), Rows(), tuple(layers), experts)


def mlp_rules(layers: Layers, *, has_bias: bool = False, norm: str = "post_attention_layernorm") -> tuple[Rule, ...]:
    """The dense feed-forward with the norm before it."""
    rules = (
        layer_rule("mlp.linear_fc1.layer_norm_weight", f"{norm}.weight", Whole(), layers),
        gate_up_rule("mlp", "mlp", layers),
        down_rule("mlp", "mlp", layers),
    )
    if not has_bias:
        return rules
    return (
        *rules,
        gate_up_rule("mlp", "mlp", layers, kind="bias"),
        layer_rule("mlp.linear_fc2.bias", "mlp.down_proj.bias", Whole(), layers),
    )


def expert_rules(config: HfConfig, layers: Layers) -> tuple[Rule, ...]:
    """Routed experts, one tensor each, with the norm before them and their router."""
    count = num_experts(config)
    return (
        layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Whole(), layers),
        layer_rule("mlp.router.weight", "mlp.gate.weight", Whole(), layers),
        gate_up_rule("mlp.experts", "mlp.experts.{expert}", layers, experts=count),
        down_rule("mlp.experts", "mlp.experts.{expert}", layers, experts=count),
    )


def shared_expert_rules(hf: str, layers: Layers) -> tuple[Rule, ...]:
    """The expert that every token passes; all tensor-parallel ranks share it."""
    return (
        gate_up_rule("mlp.shared_experts", hf, layers),
        down_rule("mlp.shared_experts", hf, layers),
    )
