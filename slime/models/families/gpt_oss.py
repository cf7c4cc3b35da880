"""gpt-oss: biases everywhere, learned attention sinks, windows on every other layer, all experts in one tensor."""

from __future__ import annotations

from slime.errors import UserError
from slime.models.families.blocks import HERE, THERE, attention_rules, edge_rules, layer_rule
from slime.models.families.hf_config import all_layers, decoder_fields, moe_fields, need, num_experts
from slime.models.families.tp_sharding import Columns, Form, InterleavedGateUp, Rows, Stacked, Whole
from slime.models.families.weight_map import Family, Fields, HfConfig, Rule


def _fields(config: HfConfig) -> Fields:
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
        "window_size": (need(config, "sliding_window") - 1, 0),  # tokens before the current one
        "window_attn_skip_freq": (
            [int(kind == "sliding_attention") for kind in kinds]
            if isinstance(kinds, list)
            else [int(layer % 2 == 0) for layer in all_layers(config)]
        ),
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": float(config.get("swiglu_limit", 7.0)),
    }


def _rules(config: HfConfig) -> tuple[Rule, ...]:
    layers = all_layers(config)
    return (
        *edge_rules(config),
        *attention_rules(config, layers, has_qkv_bias=True, has_out_bias=True),
        layer_rule("self_attention.core_attention.softmax_offset", "self_attn.sinks", Columns(), layers),
        layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Whole(), layers),
        layer_rule("mlp.router.weight", "mlp.router.weight", Whole(), layers),
        layer_rule("mlp.router.bias", "mlp.router.bias", Whole(), layers),
        _expert_rule(config, "linear_fc1.weight", "gate_up_proj", Stacked(InterleavedGateUp(), is_transposed=True)),
        _expert_rule(config, "linear_fc1.bias", "gate_up_proj_bias", Stacked(InterleavedGateUp())),
        _expert_rule(config, "linear_fc2.weight", "down_proj", Stacked(Rows(), is_transposed=True)),
        _expert_rule(config, "linear_fc2.bias", "down_proj_bias", Stacked(Whole())),
    )


def _expert_rule(config: HfConfig, megatron: str, hf: str, form: Form) -> Rule:
    names = (f"{THERE}mlp.experts.{hf}",)
    return Rule(f"{HERE}mlp.experts.{megatron}{{expert}}", names, form, all_layers(config), num_experts(config))


GPT_OSS = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    fields=_fields,
    rules=_rules,
    tool_format="gpt-oss",
    reasoning_format="gpt-oss",
    stop_tokens=("<|return|>", "<|call|>"),
)
