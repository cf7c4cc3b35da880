"""Qwen2 and Qwen2.5, dense and with experts: biases on queries, keys and values. MiMo is the dense architecture with
additional layers that training does not use."""

from __future__ import annotations

from slime.models.families.blocks import attention_rules, edge_rules, gated_expert_rules, mlp_rules
from slime.models.families.hf_config import (
    all_layers,
    decoder_fields,
    moe_fields,
    require_field,
    window_fields,
)
from slime.models.families.weight_map import Family, Fields, HfConfig, Ignored, Rule


def qwen2_fields(config: HfConfig) -> Fields:
    first = config.get("max_window_layers", 28)
    windows = window_fields(config, lambda layer: layer >= first)
    return {**decoder_fields(config), "add_qkv_bias": True, **windows}


def qwen2_rules(config: HfConfig) -> tuple[Rule, ...]:
    layers = all_layers(config)
    return (*edge_rules(config), *attention_rules(config, layers, has_qkv_bias=True), *mlp_rules(layers))


def qwen2_moe_fields(config: HfConfig) -> Fields:
    end = config.get("max_window_layers", 28)
    return {
        **decoder_fields(config),
        "add_qkv_bias": True,
        **window_fields(config, lambda layer: layer % 2 == 0 and layer < end),
        **moe_fields(config),
        "moe_shared_expert_intermediate_size": require_field(config, "shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def qwen2_moe_rules(config: HfConfig) -> tuple[Rule, ...]:
    layers = all_layers(config)
    return (*edge_rules(config), *attention_rules(config, layers, has_qkv_bias=True), *gated_expert_rules(config))


QWEN2 = Family(
    name="Qwen2.5",
    model_types=("qwen2",),
    fields=qwen2_fields,
    rules=qwen2_rules,
    tool_format="qwen25",
    reasoning_format=None,
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
)
QWEN2_MOE = Family(
    name="Qwen2-MoE",
    model_types=("qwen2_moe",),
    fields=qwen2_moe_fields,
    rules=qwen2_moe_rules,
    tool_format="qwen25",
    reasoning_format=None,
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
)
MIMO = Family(
    name="MiMo",
    model_types=("mimo",),
    fields=qwen2_fields,
    rules=qwen2_rules,
    tool_format="qwen25",
    reasoning_format="mimo",
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    ignored=lambda config: (
        Ignored("model.mtp_layers.", "it predicts a token beyond the next, which training does not use"),
    ),
)
