"""gpt-oss: biases everywhere, learned attention sinks, windows on every other layer, all experts in one tensor."""

from __future__ import annotations

from slime.errors import UserError
from slime.models.families.blocks import HF_LAYER, MEGATRON_LAYER, attention_rules, edge_rules, layer_rule
from slime.models.families.hf_config import (
    all_layers,
    decoder_fields,
    moe_fields,
    num_experts,
    require_field,
)
from slime.models.families.tp_sharding import (
    ColumnParallel,
    Form,
    InterleavedGateUp,
    Replicated,
    RowParallel,
    StackedExperts,
)
from slime.models.families.weight_map import Family, Fields, HfConfig, Rule


def gpt_oss_fields(config: HfConfig) -> Fields:
    if config.get("swiglu_alpha", 1.702) != 1.702:
        raise UserError(f"swiglu_alpha {config['swiglu_alpha']} of config.json: Megatron only supports 1.702")
    kinds = config.get("layer_types")
    return {
        **decoder_fields(config),
        **moe_fields(config),
        "moe_router_pre_softmax": False,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "window_size": (require_field(config, "sliding_window") - 1, 0),  # tokens before the current one
        "window_attn_skip_freq": (
            [int(kind == "sliding_attention") for kind in kinds]
            if isinstance(kinds, list)
            else [int(layer % 2 == 0) for layer in all_layers(config)]
        ),
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": float(config.get("swiglu_limit", 7.0)),
    }


def gpt_oss_rules(config: HfConfig) -> tuple[Rule, ...]:
    layers = all_layers(config)
    return (
        *edge_rules(config),
        *attention_rules(config, layers, has_qkv_bias=True, has_out_bias=True),
        layer_rule("self_attention.core_attention.softmax_offset", "self_attn.sinks", ColumnParallel(), layers),
        layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Replicated(), layers),
        layer_rule("mlp.router.weight", "mlp.router.weight", Replicated(), layers),
        layer_rule("mlp.router.bias", "mlp.router.bias", Replicated(), layers),
        _expert_rule(
            config, "linear_fc1.weight", "gate_up_proj", StackedExperts(InterleavedGateUp(), is_transposed=True)
        ),
        _expert_rule(config, "linear_fc1.bias", "gate_up_proj_bias", StackedExperts(InterleavedGateUp())),
        _expert_rule(config, "linear_fc2.weight", "down_proj", StackedExperts(RowParallel(), is_transposed=True)),
        _expert_rule(config, "linear_fc2.bias", "down_proj_bias", StackedExperts(Replicated())),
    )


def _expert_rule(config: HfConfig, megatron: str, hf: str, form: Form) -> Rule:
    names = (f"{HF_LAYER}mlp.experts.{hf}",)
    return Rule(
        f"{MEGATRON_LAYER}mlp.experts.{megatron}{{expert}}", names, form, all_layers(config), num_experts(config)
    )


GPT_OSS = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    fields=gpt_oss_fields,
    rules=gpt_oss_rules,
    tool_format="gpt-oss",
    reasoning_format="gpt-oss",
    stop_tokens=("<|return|>", "<|call|>"),
)
