"""DeepSeek V3, V3.1 and R1, and models of the same architecture: Moonlight (no query latent), Kimi K2."""

from __future__ import annotations

from slime.models.families.blocks import edge_rules, latent_attention_rules, sigmoid_moe_rules
from slime.models.families.hf_config import (
    all_layers,
    decoder_fields,
    latent_fields,
    multi_token_layers,
    sigmoid_moe_fields,
)
from slime.models.families.weight_map import Family, Fields, HfConfig, Rule


def latent_moe_fields(config: HfConfig) -> Fields:
    return {**decoder_fields(config), **latent_fields(config), **sigmoid_moe_fields(config)}


def latent_moe_rules(config: HfConfig) -> tuple[Rule, ...]:
    return (
        *edge_rules(config),
        *latent_attention_rules(config, all_layers(config)),
        *sigmoid_moe_rules(config),
    )


DEEPSEEK_V3 = Family(
    name="DeepSeek V3 / R1, Moonlight",
    model_types=("deepseek_v3",),
    fields=latent_moe_fields,
    rules=latent_moe_rules,
    tool_format="deepseekv3",
    reasoning_format="deepseek-r1",
    stop_tokens=("<｜end▁of▁sentence｜>",),
    ignored=multi_token_layers,
)
KIMI_K2 = Family(
    name="Kimi K2",
    model_types=("kimi_k2",),
    fields=latent_moe_fields,
    rules=latent_moe_rules,
    tool_format="kimi_k2",
    reasoning_format="kimi_k2",
    stop_tokens=("<|im_end|>", "[EOS]"),
    ignored=multi_token_layers,
)
