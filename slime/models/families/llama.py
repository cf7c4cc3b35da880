"""Llama 3 and models of the same architecture, such as SmolLM2."""

from __future__ import annotations

from slime.errors import UserError
from slime.models.families.blocks import attention_rules, edge_rules, mlp_rules
from slime.models.families.hf_config import all_layers, decoder_fields
from slime.models.families.weight_map import Family, Fields, HfConfig, Rule


def _has_biases(config: HfConfig) -> bool:
    """True if all linear layers have biases. Megatron has biases on all of them, or on none except queries, keys and
    values."""
    attention, mlp = config.get("attention_bias") is True, config.get("mlp_bias") is True
    if attention != mlp:
        raise UserError(
            f"attention_bias {str(attention).lower()} with mlp_bias {str(mlp).lower()} in config.json: Megatron has "
            "biases on all linear layers or on none, so train this model with --train-backend fsdp"
        )
    return attention


def llama_fields(config: HfConfig) -> Fields:
    return {**decoder_fields(config), "add_bias_linear": _has_biases(config)}


def llama_rules(config: HfConfig) -> tuple[Rule, ...]:
    layers, biases = all_layers(config), _has_biases(config)
    return (
        *edge_rules(config),
        *attention_rules(config, layers, has_qkv_bias=biases, has_out_bias=biases),
        *mlp_rules(layers, has_bias=biases),
    )


LLAMA = Family(
    name="Llama 3",
    model_types=("llama",),
    fields=llama_fields,
    rules=llama_rules,
    tool_format="llama3",
    reasoning_format=None,
    stop_tokens=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
)
