"""Latent attention with experts: DeepSeek V3, V3.1 and R1, Moonlight (no query latent), Kimi K2.

GLM-5 and DeepSeek V3.2 attend only to the tokens that an indexer picks (DSA).
"""

from __future__ import annotations

from dataclasses import replace

from slime.models.families.blocks import edge_rules, latent_attention_rules, layer_rule, sigmoid_moe_rules
from slime.models.families.hf_config import (
    all_layers,
    decoder_fields,
    latent_fields,
    multi_token_layers,
    require_field,
    sigmoid_moe_fields,
)
from slime.models.families.tp_sharding import Replicated
from slime.models.families.weight_map import Family, Fields, HfConfig, Rule, Support


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
KIMI_K2 = replace(
    DEEPSEEK_V3,
    name="Kimi K2",
    model_types=("kimi_k2",),
    tool_format="kimi_k2",
    reasoning_format="kimi_k2",
    stop_tokens=("<|im_end|>", "[EOS]"),
)

_INDEXER = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "linear_weights_proj.weight": "weights_proj.weight",
}


def indexer_layers(config: HfConfig) -> tuple[int, ...]:
    """The layers that have an indexer; each other layer uses the tokens that the last indexer before it picked."""
    layers, kinds = all_layers(config), config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is not None:
        return tuple(layer for layer, kind in zip(layers, kinds, strict=True) if kind in ("full", "F"))
    step, first = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    return tuple(layer for layer in layers if max(layer - first + 1, 0) % step == 0)


def sparse_attention_fields(config: HfConfig) -> Fields:
    return {
        **latent_moe_fields(config),
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": require_field(config, "index_n_heads"),
        "dsa_indexer_head_dim": require_field(config, "index_head_dim"),
        "dsa_indexer_topk": require_field(config, "index_topk"),
        "dsa_indexer_layers": list(indexer_layers(config)),
    }


def sparse_attention_rules(config: HfConfig) -> tuple[Rule, ...]:
    layers = indexer_layers(config)
    indexer = [
        layer_rule(f"self_attention.core_attention.indexer.{here}", f"self_attn.indexer.{there}", Replicated(), layers)
        for here, there in _INDEXER.items()
    ]
    return (*latent_moe_rules(config), *indexer)


_OTHER_ROTATION = (
    "its indexers rotate the two halves of a head; only GLM-5's rotation of neighbouring pairs is implemented"
)
GLM5 = Family(
    name="GLM-5",
    model_types=("glm_moe_dsa",),
    fields=sparse_attention_fields,
    rules=sparse_attention_rules,
    tool_format="glm47",
    reasoning_format="glm45",
    stop_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ignored=multi_token_layers,
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="DeepSeek V3.2",
    model_types=("deepseek_v32",),
    fields=sparse_attention_fields,
    rules=sparse_attention_rules,
    tool_format="deepseekv32",
    reasoning_format="deepseek-v3",
    support=Support(fsdp=_OTHER_ROTATION, megatron=_OTHER_ROTATION),
)
