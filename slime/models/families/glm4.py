"""GLM-4 and GLM-Z1: norms before and after attention and feed-forward, half of each head rotated in pairs.

GLM-4.5, 4.6 and 4.7: experts with a sigmoid router, half of each head rotated, some with norms on queries and keys.
GLM-4.7-Flash has latent attention.
"""

from __future__ import annotations

from dataclasses import replace

from slime.models.families.blocks import (
    HF_LAYER,
    MEGATRON_LAYER,
    attention_rules,
    down_rule,
    edge_rules,
    layer_rule,
    sigmoid_moe_rules,
)
from slime.models.families.deepseek import latent_moe_fields, latent_moe_rules
from slime.models.families.hf_config import (
    all_layers,
    decoder_fields,
    multi_token_layers,
    sigmoid_moe_fields,
)
from slime.models.families.tp_sharding import FusedGateUp, Replicated
from slime.models.families.weight_map import Family, Fields, HfConfig, Rule


def _has_bias(config: HfConfig) -> bool:
    return config.get("attention_bias", True) is True


def glm4_fields(config: HfConfig) -> Fields:
    return {
        **decoder_fields({"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, **config}),
        "rotary_interleaved": True,
        "add_qkv_bias": _has_bias(config),
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
    }


def glm4_rules(config: HfConfig) -> tuple[Rule, ...]:
    layers = all_layers(config)
    return (
        *edge_rules(config),
        *attention_rules(config, layers, has_qkv_bias=_has_bias(config)),
        layer_rule("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight", Replicated(), layers),
        layer_rule("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", Replicated(), layers),
        Rule(f"{MEGATRON_LAYER}mlp.linear_fc1.weight", (f"{HF_LAYER}mlp.gate_up_proj.weight",), FusedGateUp(), layers),
        down_rule("mlp", "mlp", layers),
        layer_rule("post_mlp_layernorm.weight", "post_mlp_layernorm.weight", Replicated(), layers),
    )


GLM4 = Family(
    name="GLM-4 / GLM-Z1",
    model_types=("glm4",),
    fields=glm4_fields,
    rules=glm4_rules,
    tool_format=None,
    reasoning_format="qwen3",
    stop_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
)


def glm4_moe_fields(config: HfConfig) -> Fields:
    return {
        **decoder_fields({"partial_rotary_factor": 0.5, **config}),
        **sigmoid_moe_fields(config),
        "add_qkv_bias": config.get("attention_bias") is True,
        "qk_layernorm": config.get("use_qk_norm") is True,
    }


def glm4_moe_rules(config: HfConfig) -> tuple[Rule, ...]:
    attention = attention_rules(
        config,
        all_layers(config),
        has_qkv_bias=config.get("attention_bias") is True,
        has_head_norms=config.get("use_qk_norm") is True,
    )
    return (*edge_rules(config), *attention, *sigmoid_moe_rules(config))


GLM4_MOE = replace(
    GLM4,
    name="GLM-4.5 / 4.6 / 4.7",
    model_types=("glm4_moe",),
    fields=glm4_moe_fields,
    rules=glm4_moe_rules,
    tool_format="glm45",
    reasoning_format="glm45",
    ignored=multi_token_layers,
)
GLM4_MOE_LITE = replace(
    GLM4_MOE,
    name="GLM-4.7-Flash",
    model_types=("glm4_moe_lite",),
    fields=latent_moe_fields,
    rules=latent_moe_rules,
    tool_format="glm47",
)
