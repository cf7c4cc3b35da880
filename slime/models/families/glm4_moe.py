"""GLM-4.5, 4.6 and 4.7: experts by sigmoids, half of each head rotated, some with norms on queries and keys; Flash is
the one with latent attention."""

from __future__ import annotations

from slime.models.families.blocks import attention_rules, edge_rules, sigmoid_moe_rules
from slime.models.families.deepseek import latent_moe_fields, latent_moe_rules
from slime.models.families.facts import Family, Fields, HfConfig
from slime.models.families.reading import all_layers, decoder_fields, layers_after_the_last, sigmoid_moe_fields
from slime.models.families.rules import Rule


def _fields(config: HfConfig) -> Fields:
    return {
        **decoder_fields({"partial_rotary_factor": 0.5, **config}),
        **sigmoid_moe_fields(config),
        "add_qkv_bias": config.get("attention_bias") is True,
        "qk_layernorm": config.get("use_qk_norm") is True,
    }


def _rules(config: HfConfig) -> tuple[Rule, ...]:
    attention = attention_rules(
        config,
        all_layers(config),
        has_qkv_bias=config.get("attention_bias") is True,
        has_head_norms=config.get("use_qk_norm") is True,
    )
    return (*edge_rules(config), *attention, *sigmoid_moe_rules(config))


GLM4_MOE = Family(
    name="GLM-4.5 / 4.6 / 4.7",
    model_types=("glm4_moe",),
    fields=_fields,
    rules=_rules,
    tool_format="glm45",
    reasoning_format="glm45",
    stop_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ignored=layers_after_the_last,
)
GLM4_MOE_LITE = Family(
    name="GLM-4.7-Flash",
    model_types=("glm4_moe_lite",),
    fields=latent_moe_fields,
    rules=latent_moe_rules,
    tool_format="glm47",
    reasoning_format="glm45",
    stop_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ignored=layers_after_the_last,
)
