"""Weight rules that families share: embeddings, attention, feed-forward, experts."""

from __future__ import annotations

from collections.abc import Sequence

from slime.models.families.hf_config import all_layers, is_tied, kv_heads, moe_layers, num_experts
from slime.models.families.tp_sharding import (
    ColumnParallel,
    Form,
    FusedGateUp,
    GateUp,
    Qkv,
    Replicated,
    RowParallel,
    StackedExperts,
    Vocab,
)
from slime.models.families.weight_map import HfConfig, Rule

Layers = Sequence[int]
MEGATRON_LAYER, HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."


def edge_rules(config: HfConfig) -> tuple[Rule, ...]:
    """Rules of embedding, last norm and output layer; a tied output layer is a copy on the last pipeline stage."""
    tied = is_tied(config)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return (
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocab()),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
        Rule("output_layer.weight", (head,), Vocab(), is_copy=tied),
    )


def layer_rule(megatron: str, hf: str, form: Form, layers: Layers) -> Rule:
    return Rule(MEGATRON_LAYER + megatron, (HF_LAYER + hf,), form, tuple(layers))


def attention_rules(
    config: HfConfig,
    layers: Layers,
    *,
    has_qkv_bias: bool = False,
    has_out_bias: bool = False,
    has_head_norms: bool = False,
    is_gated: bool = False,
) -> tuple[Rule, ...]:
    """Rules of grouped-query attention with the norm before it."""
    form, layers = Qkv(kv_heads(config), is_gated), tuple(layers)

    def qkv(kind: str) -> Rule:
        names = tuple(f"{HF_LAYER}self_attn.{part}_proj.{kind}" for part in "qkv")
        return Rule(f"{MEGATRON_LAYER}self_attention.linear_qkv.{kind}", names, form, layers)

    rules = [
        layer_rule("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", Replicated(), layers),
        qkv("weight"),
        layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", RowParallel(), layers),
    ]
    if has_qkv_bias:
        rules.append(qkv("bias"))
    if has_out_bias:
        rules.append(layer_rule("self_attention.linear_proj.bias", "self_attn.o_proj.bias", Replicated(), layers))
    if has_head_norms:
        rules += [
            layer_rule(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight", Replicated(), layers)
            for part in "qk"
        ]
    return tuple(rules)


def gate_up_rule(megatron: str, hf: str, layers: Layers, *, kind: str = "weight", experts: int = 0) -> Rule:
    """Rule of the gate and up projections under `hf`, which are `megatron`.linear_fc1."""
    names = tuple(f"{HF_LAYER}{hf}.{part}_proj.{kind}" for part in ("gate", "up"))
    suffix, all_experts = kind + ("{expert}" if experts else ""), HF_LAYER + hf.removesuffix(".{expert}")
    stacked = (f"{all_experts}.gate_up_proj", StackedExperts(FusedGateUp())) if experts else None
    target = f"{MEGATRON_LAYER}{megatron}.linear_fc1.{suffix}"
    return Rule(target, names, GateUp(), tuple(layers), experts, stacked=stacked)


def down_rule(megatron: str, hf: str, layers: Layers, *, experts: int = 0) -> Rule:
    """Rule of the down projection under `hf`, which is `megatron`.linear_fc2."""
    suffix, all_experts = "weight{expert}" if experts else "weight", HF_LAYER + hf.removesuffix(".{expert}")
    stacked = (f"{all_experts}.down_proj", StackedExperts(RowParallel())) if experts else None
    target, name = f"{MEGATRON_LAYER}{megatron}.linear_fc2.{suffix}", f"{HF_LAYER}{hf}.down_proj.weight"
    return Rule(target, (name,), RowParallel(), tuple(layers), experts, stacked=stacked)


def mlp_rules(layers: Layers, *, has_bias: bool = False) -> tuple[Rule, ...]:
    """Rules of the dense feed-forward with the norm before it."""
    rules = (
        layer_rule("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", Replicated(), layers),
        gate_up_rule("mlp", "mlp", layers),
        down_rule("mlp", "mlp", layers),
    )
    if not has_bias:
        return rules
    return (
        *rules,
        gate_up_rule("mlp", "mlp", layers, kind="bias"),
        layer_rule("mlp.linear_fc2.bias", "mlp.down_proj.bias", Replicated(), layers),
    )


def expert_rules(config: HfConfig) -> tuple[Rule, ...]:
    """Rules of dense layers, and of layers of routed experts, one tensor each, with the norm before them and their
    router."""
    sparse, count = moe_layers(config), num_experts(config)
    dense = [layer for layer in all_layers(config) if layer not in set(sparse)]
    return (
        *mlp_rules(dense),
        layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Replicated(), sparse),
        layer_rule("mlp.router.weight", "mlp.gate.weight", Replicated(), sparse),
        gate_up_rule("mlp.experts", "mlp.experts.{expert}", sparse, experts=count),
        down_rule("mlp.experts", "mlp.experts.{expert}", sparse, experts=count),
    )


def latent_attention_rules(config: HfConfig, layers: Layers) -> tuple[Rule, ...]:
    """Rules of latent attention: latents are whole on every rank, heads are sharded.

    The norm before attention is a parameter of its own; the norms of the latents belong to the up projections.
    """

    def rule(megatron: str, hf: str, form: Form) -> Rule:
        return layer_rule(f"self_attention.{megatron}", f"self_attn.{hf}", form, layers)

    queries = (
        [rule("linear_q_proj.weight", "q_proj.weight", ColumnParallel())]
        if config.get("q_lora_rank") is None
        else [
            rule("linear_q_down_proj.weight", "q_a_proj.weight", Replicated()),
            rule("linear_q_up_proj.layer_norm_weight", "q_a_layernorm.weight", Replicated()),
            rule("linear_q_up_proj.weight", "q_b_proj.weight", ColumnParallel()),
        ]
    )
    return (
        layer_rule("input_layernorm.weight", "input_layernorm.weight", Replicated(), layers),
        *queries,
        rule("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", Replicated()),
        rule("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm.weight", Replicated()),
        rule("linear_kv_up_proj.weight", "kv_b_proj.weight", ColumnParallel()),
        rule("linear_proj.weight", "o_proj.weight", RowParallel()),
    )


def sigmoid_moe_rules(config: HfConfig) -> tuple[Rule, ...]:
    """Rules of dense layers, and of layers of experts with a correction bias and shared experts.

    The bias is added to scores when experts are chosen; a buffer in Megatron.
    """
    sparse = moe_layers(config)
    shared = shared_expert_rules("mlp.shared_experts", sparse) if config.get("n_shared_experts") else ()
    bias = layer_rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", Replicated(), sparse)
    return (*expert_rules(config), bias, *shared)


def shared_expert_rules(hf: str, layers: Layers) -> tuple[Rule, ...]:
    """Rules of the expert that processes every token; it is sharded over all tensor-parallel ranks."""
    return (
        gate_up_rule("mlp.shared_experts", hf, layers),
        down_rule("mlp.shared_experts", hf, layers),
    )


def gated_expert_rules(config: HfConfig) -> tuple[Rule, ...]:
    """Rules of dense layers, and of layers of experts with a shared expert that has its own gate."""
    sparse = moe_layers(config)
    return (
        *expert_rules(config),
        *shared_expert_rules("mlp.shared_expert", sparse),
        layer_rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", Replicated(), sparse),
    )
