"""Qwen, dense and with experts, in three architectures.

Qwen2 and Qwen2.5 have biases on queries, keys and values; MiMo is the dense one with additional layers that training
does not use. Qwen3 has a norm on every head of queries and keys. Qwen3-Next, 3.5 and 3.6 have gated delta nets
interleaved with gated attention, and zero-centered norms.
"""

from __future__ import annotations

from dataclasses import replace

from slime.errors import UserError
from slime.models.families.blocks import (
    HF_LAYER,
    MEGATRON_LAYER,
    attention_rules,
    edge_rules,
    expert_rules,
    gated_expert_rules,
    layer_rule,
    mlp_rules,
)
from slime.models.families.hf_config import (
    BEYOND_NEXT,
    all_layers,
    decoder_fields,
    moe_fields,
    require_field,
    window_fields,
)
from slime.models.families.tp_sharding import (
    ColumnParallel,
    DeltaInput,
    Form,
    GroupedDeltaInput,
    Replicated,
    RowParallel,
    Segments,
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
QWEN2_MOE = replace(QWEN2, name="Qwen2-MoE", model_types=("qwen2_moe",), fields=qwen2_moe_fields, rules=qwen2_moe_rules)
MIMO = replace(
    QWEN2,
    name="MiMo",
    model_types=("mimo",),
    reasoning_format="mimo",
    ignored=lambda config: (Ignored("model.mtp_layers.", BEYOND_NEXT),),
)


def _qwen3_attention_fields(config: HfConfig) -> Fields:
    if config.get("attention_bias") is True:
        raise UserError(
            "attention_bias true in config.json of a Qwen3 model: Megatron has no bias on attention outputs alone, so "
            "train this model with --train-backend fsdp"
        )
    return {**decoder_fields(config), "qk_layernorm": True}


def qwen3_fields(config: HfConfig) -> Fields:
    first = config.get("max_window_layers", 28)
    return {**_qwen3_attention_fields(config), **window_fields(config, lambda layer: layer >= first)}


def qwen3_moe_fields(config: HfConfig) -> Fields:
    every_layer = {name: value for name, value in config.items() if name != "layer_types"}  # transformers ignores them
    return {**_qwen3_attention_fields(config), **window_fields(every_layer, lambda _: True), **moe_fields(config)}


def _qwen3_attention_rules(config: HfConfig) -> tuple[Rule, ...]:
    return attention_rules(config, all_layers(config), has_head_norms=True)


def qwen3_rules(config: HfConfig) -> tuple[Rule, ...]:
    return (*edge_rules(config), *_qwen3_attention_rules(config), *mlp_rules(all_layers(config)))


def qwen3_moe_rules(config: HfConfig) -> tuple[Rule, ...]:
    return (*edge_rules(config), *_qwen3_attention_rules(config), *expert_rules(config))


QWEN3 = replace(
    QWEN2, name="Qwen3", model_types=("qwen3",), fields=qwen3_fields, rules=qwen3_rules, reasoning_format="qwen3"
)
QWEN3_MOE = replace(QWEN3, name="Qwen3-MoE", model_types=("qwen3_moe",), fields=qwen3_moe_fields, rules=qwen3_moe_rules)


def linear_layers(config: HfConfig) -> tuple[int, ...]:
    """The layers that are gated delta nets."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    step = config.get("full_attention_interval") or 4
    return tuple(layer for layer in all_layers(config) if (layer + 1) % step)


def qwen3_5_fields(config: HfConfig) -> Fields:
    linear = set(linear_layers(config))
    return {
        **decoder_fields({"partial_rotary_factor": 0.25, **config}),
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(layer in linear) for layer in all_layers(config)],
        **{name: require_field(config, name) for name in _DELTA_NET_FIELDS},
    }


_DELTA_NET_FIELDS = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def qwen3_5_moe_fields(config: HfConfig) -> Fields:
    return {
        **qwen3_5_fields(config),
        **moe_fields({"norm_topk_prob": True, **config}),
        "moe_shared_expert_intermediate_size": require_field(config, "shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


def _delta_net_rules(config: HfConfig, inputs: tuple[str, ...], form: Form) -> tuple[Rule, ...]:
    linear = linear_layers(config)
    full = [layer for layer in all_layers(config) if layer not in set(linear)]
    key = require_field(config, "linear_key_head_dim") * require_field(config, "linear_num_key_heads")
    value = require_field(config, "linear_value_head_dim") * require_field(config, "linear_num_value_heads")
    names = tuple(f"{HF_LAYER}linear_attn.{name}.weight" for name in inputs)

    def rule(megatron: str, hf: str, form: Form) -> Rule:
        return layer_rule(f"self_attention.{megatron}", f"linear_attn.{hf}", form, linear)

    return (
        *attention_rules(config, full, has_head_norms=True, is_gated=True),
        layer_rule("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight", Replicated(), linear),
        Rule(f"{MEGATRON_LAYER}self_attention.in_proj.weight", names, form, linear),
        rule("conv1d.weight", "conv1d.weight", Segments((key, key, value))),
        rule("dt_bias", "dt_bias", ColumnParallel()),
        rule("A_log", "A_log", ColumnParallel()),
        rule("out_norm.weight", "norm.weight", Replicated()),
        rule("out_proj.weight", "out_proj.weight", RowParallel()),
    )


def qwen3_next_rules(config: HfConfig) -> tuple[Rule, ...]:
    form = GroupedDeltaInput(
        require_field(config, "linear_num_key_heads"), require_field(config, "linear_key_head_dim")
    )
    return (
        *edge_rules(config),
        *_delta_net_rules(config, ("in_proj_qkvz", "in_proj_ba"), form),
        *gated_expert_rules(config),
    )


def _split_attention_rules(config: HfConfig) -> tuple[Rule, ...]:
    form = DeltaInput(require_field(config, "linear_key_head_dim") * require_field(config, "linear_num_key_heads"))
    return _delta_net_rules(config, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), form)


def qwen3_5_rules(config: HfConfig) -> tuple[Rule, ...]:
    return (*edge_rules(config), *_split_attention_rules(config), *mlp_rules(all_layers(config)))


def qwen3_5_moe_rules(config: HfConfig) -> tuple[Rule, ...]:
    return (*edge_rules(config), *_split_attention_rules(config), *gated_expert_rules(config))


def unused_tensors_of_qwen3_5(config: HfConfig) -> tuple[Ignored, ...]:
    return (
        Ignored("mtp.", BEYOND_NEXT),
        Ignored("model.visual.", "it reads images, which text does not use"),
    )


QWEN3_NEXT = replace(
    QWEN3,
    name="Qwen3-Next",
    model_types=("qwen3_next",),
    fields=qwen3_5_moe_fields,
    rules=qwen3_next_rules,
    ignored=unused_tensors_of_qwen3_5,
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    name="Qwen3.5 / 3.6",
    model_types=("qwen3_5", "qwen3_5_text"),
    fields=qwen3_5_fields,
    rules=qwen3_5_rules,
    tool_format="qwen3_coder",
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3.5-MoE / 3.6-MoE",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    fields=qwen3_5_moe_fields,
    rules=qwen3_5_moe_rules,
)
