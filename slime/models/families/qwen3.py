"""Qwen3, dense and with experts: a norm on every head of queries and keys."""

from __future__ import annotations

from slime.errors import UserError
from slime.models.families.blocks import attention_rules, edge_rules, expert_rules, mlp_rules
from slime.models.families.hf_config import all_layers, decoder_fields, moe_fields, moe_layers, window_fields
from slime.models.families.weight_map import Family, Fields, HfConfig, Rule


def _attention_fields(config: HfConfig) -> Fields:
    if config.get("attention_bias") is True:
        raise UserError(
            "attention_bias true in config.json of a Qwen3 model: Megatron has no bias on attention outputs alone, so "
            "train this model with --train-backend fsdp"
        )
    return {**decoder_fields(config), "qk_layernorm": True}


def qwen3_fields(config: HfConfig) -> Fields:
    first = config.get("max_window_layers", 28)
    return {**_attention_fields(config), **window_fields(config, lambda layer: layer >= first)}


def qwen3_moe_fields(config: HfConfig) -> Fields:
    every_layer = {name: value for name, value in config.items() if name != "layer_types"}  # transformers ignores them
    return {**_attention_fields(config), **window_fields(every_layer, lambda _: True), **moe_fields(config)}


def _attention_rules(config: HfConfig) -> tuple[Rule, ...]:
    return attention_rules(config, all_layers(config), has_head_norms=True)


def qwen3_rules(config: HfConfig) -> tuple[Rule, ...]:
    return (*edge_rules(config), *_attention_rules(config), *mlp_rules(all_layers(config)))


def qwen3_moe_rules(config: HfConfig) -> tuple[Rule, ...]:
    sparse = moe_layers(config)
    dense = tuple(layer for layer in all_layers(config) if layer not in set(sparse))
    return (*edge_rules(config), *_attention_rules(config), *mlp_rules(dense), *expert_rules(config, sparse))


QWEN3 = Family(
    name="Qwen3",
    model_types=("qwen3",),
    fields=qwen3_fields,
    rules=qwen3_rules,
    tool_format="qwen25",
    reasoning_format="qwen3",
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
)
QWEN3_MOE = Family(
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    fields=qwen3_moe_fields,
    rules=qwen3_moe_rules,
    tool_format="qwen25",
    reasoning_format="qwen3",
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
)
