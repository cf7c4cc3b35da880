"""GLM-4 and GLM-Z1: norms before and after attention and feed-forward, half of each head rotated in pairs."""

from __future__ import annotations

from slime.models.families.blocks import HERE, THERE, attention_rules, down_rule, edge_rules, layer_rule
from slime.models.families.facts import Family, Fields, HfConfig
from slime.models.families.forms import FusedGateUp, Whole
from slime.models.families.reading import all_layers, decoder_fields
from slime.models.families.rules import Rule


def _has_bias(config: HfConfig) -> bool:
    return config.get("attention_bias", True) is True


def _fields(config: HfConfig) -> Fields:
    return {
        **decoder_fields({"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, **config}),
        "rotary_interleaved": True,
        "add_qkv_bias": _has_bias(config),
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
    }


def _rules(config: HfConfig) -> tuple[Rule, ...]:
    layers = all_layers(config)
    return (
        *edge_rules(config),
        *attention_rules(config, layers, has_qkv_bias=_has_bias(config)),
        layer_rule("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight", Whole(), layers),
        layer_rule("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", Whole(), layers),
        Rule(f"{HERE}mlp.linear_fc1.weight", (f"{THERE}mlp.gate_up_proj.weight",), FusedGateUp(), layers),
        down_rule("mlp", "mlp", layers),
        layer_rule("post_mlp_layernorm.weight", "post_mlp_layernorm.weight", Whole(), layers),
    )


GLM4 = Family(
    name="GLM-4 / GLM-Z1",
    model_types=("glm4",),
    fields=_fields,
    rules=_rules,
    tool_format=None,
    reasoning_format="qwen3",
    stop_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
)
