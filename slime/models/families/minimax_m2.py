"""MiniMax M2: one norm over all heads of queries and one over all of keys, experts with a sigmoid router."""

from __future__ import annotations

from slime.models.families.blocks import HF_LAYER, MEGATRON_LAYER, attention_rules, edge_rules, layer_rule
from slime.models.families.hf_config import (
    BEYOND_NEXT,
    all_layers,
    decoder_fields,
    head_dim,
    num_experts,
    sigmoid_moe_fields,
)
from slime.models.families.tp_sharding import ColumnParallel, GateUp, Replicated, RowParallel
from slime.models.families.weight_map import Family, Fields, HfConfig, Ignored, Rule, Support

_EXPERT = f"{HF_LAYER}block_sparse_moe.experts.{{expert}}."


def minimax_fields(config: HfConfig) -> Fields:
    rotated = {"partial_rotary_factor": config["rotary_dim"] / head_dim(config)} if "rotary_dim" in config else {}
    full = {"rope_theta": 5_000_000.0, **rotated, **config}
    return {
        **decoder_fields(full),
        **sigmoid_moe_fields({**full, "moe_intermediate_size": config["intermediate_size"]}),
        "qk_layernorm": True,
    }


def minimax_rules(config: HfConfig) -> tuple[Rule, ...]:
    layers, count = all_layers(config), num_experts(config)
    experts = f"{MEGATRON_LAYER}mlp.experts."
    return (
        *edge_rules(config),
        *attention_rules(config, layers),
        *(
            layer_rule(
                f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight", ColumnParallel(), layers
            )
            for part in "qk"
        ),
        layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Replicated(), layers),
        layer_rule("mlp.router.weight", "block_sparse_moe.gate.weight", Replicated(), layers),
        layer_rule("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias", Replicated(), layers),
        Rule(
            f"{experts}linear_fc1.weight{{expert}}",
            (f"{_EXPERT}w1.weight", f"{_EXPERT}w3.weight"),
            GateUp(),
            layers,
            count,
        ),
        Rule(f"{experts}linear_fc2.weight{{expert}}", (f"{_EXPERT}w2.weight",), RowParallel(), layers, count),
    )


MINIMAX_M2 = Family(
    name="MiniMax M2",
    model_types=("minimax_m2",),
    fields=minimax_fields,
    rules=minimax_rules,
    tool_format="minimax-m2",
    reasoning_format="minimax",
    stop_tokens=("[e~[",),
    support=Support(megatron="MiniMax M2 normalises all heads of a token together; Megatron-Core has no such layer"),
    ignored=lambda config: (Ignored("mtp.", BEYOND_NEXT),),
)
