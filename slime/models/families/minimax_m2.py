"""MiniMax M2: one norm over all heads of queries and one over all of keys, experts with a sigmoid router."""

from __future__ import annotations

from slime.models.families.blocks import HERE, THERE, attention_rules, edge_rules, layer_rule
from slime.models.families.hf_config import (
    all_layers,
    decoder_fields,
    head_dim,
    num_experts,
    sigmoid_moe_fields,
)
from slime.models.families.tp_sharding import Columns, GateUp, Rows, Whole
from slime.models.families.weight_map import Family, Fields, HfConfig, Ignored, Rule, Support

_EXPERT = f"{THERE}block_sparse_moe.experts.{{expert}}."


def _fields(config: HfConfig) -> Fields:
    rotated = {"partial_rotary_factor": config["rotary_dim"] / head_dim(config)} if "rotary_dim" in config else {}
    full = {"rope_theta": 5_000_000.0, **rotated, **config}
    return {
        **decoder_fields(full),
        **sigmoid_moe_fields({**full, "moe_intermediate_size": config["intermediate_size"]}),
        "qk_layernorm": True,
    }


def _rules(config: HfConfig) -> tuple[Rule, ...]:
    layers, count = all_layers(config), num_experts(config)
    experts = f"{HERE}mlp.experts."
    return (
        *edge_rules(config),
        *attention_rules(config, layers),
        *(
            layer_rule(f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight", Columns(), layers)
            for part in "qk"
        ),
        layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Whole(), layers),
        layer_rule("mlp.router.weight", "block_sparse_moe.gate.weight", Whole(), layers),
        layer_rule("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias", Whole(), layers),
        Rule(
            f"{experts}linear_fc1.weight{{expert}}",
            (f"{_EXPERT}w1.weight", f"{_EXPERT}w3.weight"),
            GateUp(),
            layers,
            count,
        ),
        Rule(f"{experts}linear_fc2.weight{{expert}}", (f"{_EXPERT}w2.weight",), Rows(), layers, count),
    )


MINIMAX_M2 = Family(
    name="MiniMax M2",
    model_types=("minimax_m2",),
    fields=_fields,
    rules=_rules,
    tool_format="minimax-m2",
    reasoning_format="minimax",
    stop_tokens=("[e~[",),
    support=Support(megatron="MiniMax M2 normalises all heads of a token together; Megatron-Core has no such layer"),
    ignored=lambda config: (Ignored("mtp.", "it predicts a token beyond the next, which training does not use"),),
)
