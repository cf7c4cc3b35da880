"""Readers of config.json that families share; they return the fields under Megatron's names.

Invariant: a number that decides the shape of the model is read or refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.errors import UserError
from slime.models.families.weight_map import Fields, HfConfig, Ignored
from slime.storage.json_types import JsonObject

BEYOND_NEXT = "it predicts a token beyond the next, which training does not use"
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


def require_field(config: HfConfig, *names: str) -> Any:
    """The value of the first of these fields that config.json has; UserError if it has none of them."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise UserError(
        f"config.json of a {config.get('model_type', 'nameless')} model has no {' or '.join(names)}, so its shape is "
        "unknown: copy or download the model folder again"
    )


def head_dim(config: HfConfig) -> int:
    return int(
        config.get("head_dim") or require_field(config, "hidden_size") // require_field(config, "num_attention_heads")
    )


def kv_heads(config: HfConfig) -> int:
    return int(config.get("num_key_value_heads") or require_field(config, "num_attention_heads"))


def all_layers(config: HfConfig) -> tuple[int, ...]:
    return tuple(range(require_field(config, "num_hidden_layers")))


def is_tied(config: HfConfig) -> bool:
    return config.get("tie_word_embeddings") is True


def decoder_fields(config: HfConfig) -> Fields:
    """Fields of every decoder: sizes, norm, gated feed-forward, vocabulary; no biases, no dropout."""
    activation = str(config.get("hidden_act", "silu"))
    if activation not in _ACTIVATIONS:
        raise UserError(f"hidden_act {activation} of config.json is not one of {', '.join(_ACTIVATIONS)}")
    return {
        "num_layers": require_field(config, "num_hidden_layers"),
        "hidden_size": require_field(config, "hidden_size"),
        "ffn_hidden_size": require_field(config, "intermediate_size", "moe_intermediate_size"),
        "num_attention_heads": require_field(config, "num_attention_heads"),
        "num_query_groups": kv_heads(config),
        "kv_channels": head_dim(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "activation_func": activation,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "vocab_size": require_field(config, "vocab_size"),
        "max_sequence_length": config.get("max_position_embeddings", 4096),
        "share_embeddings_and_output_weights": is_tied(config),
        **rotary_fields(config),
    }


def window_fields(config: HfConfig, by_default: Callable[[int], bool]) -> Fields:
    """Attention windows of Qwen's layers, if `use_sliding_window` enables them.

    `by_default` decides which layers have a window if the config has no `layer_types`.
    """
    if config.get("use_sliding_window") is not True or not config.get("sliding_window", 4096):
        return {}
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        windowed = [int(kind == "sliding_attention") for kind in kinds]
    else:
        windowed = [int(by_default(layer)) for layer in all_layers(config)]
    if not any(windowed):
        return {}
    before = int(config.get("sliding_window", 4096)) - 1  # the token itself is not counted
    return {"window_size": (before, 0), "window_attn_skip_freq": windowed}


def rope_entry(config: HfConfig) -> JsonObject:
    """Parameters of rotary embeddings: `rope_parameters`, or `rope_scaling` and `rope_theta` of older folders."""
    entry: JsonObject = {}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(name), dict):
            entry |= config[name]
    entry.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    entry.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    entry.setdefault("rope_type", entry.get("type", "default"))
    return entry


def rotary_fields(config: HfConfig) -> Fields:
    entry = rope_entry(config)
    fields: Fields = {
        "position_embedding_type": "rope",
        "rotary_base": entry["rope_theta"],
        "rotary_percent": entry["partial_rotary_factor"],
        "rotary_interleaved": False,
    }
    kind = entry["rope_type"]
    if kind in ("default", "mrope"):  # text has the same position on all axes of mrope
        return fields
    if kind == "linear":
        return {**fields, "seq_len_interpolation_factor": float(entry["factor"])}
    if kind == "llama3":
        fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
        for name, value in fixed.items():
            if entry.get(name, value) != value:
                raise UserError(
                    f"{name} {entry[name]} of config.json: Megatron's Llama 3 rotation only supports {value}"
                )
        return {**fields, "rope_scaling": True, "rope_scaling_factor": float(entry.get("factor", 8.0))}
    if kind == "yarn":
        return {**fields, "position_embedding_type": "yarn", **_yarn_fields(config, entry)}
    raise UserError(f"rope_type {kind} of config.json is not supported by Megatron: default, linear, llama3 or yarn")


def _yarn_fields(config: HfConfig, entry: JsonObject) -> Fields:
    """Fields of YaRN; the mscales, whose quotient scales rotated queries and keys, count only if both are set."""
    original = entry.get("original_max_position_embeddings") or require_field(config, "max_position_embeddings")
    fields: Fields = {
        "yarn_rotary_scaling_factor": float(entry["factor"]),
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": float(entry.get("beta_fast") or 32),
        "yarn_beta_slow": float(entry.get("beta_slow") or 1),
    }
    if entry.get("attention_factor") is not None:
        raise UserError("attention_factor of config.json's rope_parameters: Megatron computes it and takes no other")
    has_mscales = entry.get("mscale") and entry.get("mscale_all_dim")
    fields["yarn_mscale"] = float(entry["mscale"]) if has_mscales else 1.0
    fields["yarn_mscale_all_dim"] = float(entry["mscale_all_dim"]) if has_mscales else 0.0
    fields["yarn_correction_range_round_to_int"] = bool(entry.get("truncate", True))
    return fields


def latent_fields(config: HfConfig) -> Fields:
    """Fields of multi-head latent attention, with norms on both latents."""
    if config.get("attention_bias") is True or config.get("rope_interleave") is False:
        raise UserError(
            "attention_bias true or rope_interleave false in config.json: Megatron's latent attention has neither, so "
            "train this model with --train-backend fsdp"
        )
    fields: Fields = {
        "multi_latent_attention": True,
        "num_query_groups": require_field(config, "num_attention_heads"),
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": require_field(config, "kv_lora_rank"),
        "qk_head_dim": require_field(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": require_field(config, "qk_rope_head_dim"),
        "v_head_dim": require_field(config, "v_head_dim"),
        "kv_channels": require_field(config, "qk_nope_head_dim") + require_field(config, "qk_rope_head_dim"),
        "qk_layernorm": True,
        "latent_layernorm_epsilon": 1e-6,  # fixed in transformers, which ignores rms_norm_eps here
        "position_embedding_type": "rope",
    }
    entry = rope_entry(config)
    fields |= {"rope_type": "rope", "rotary_base": entry["rope_theta"], "rotary_percent": 1.0}
    if entry["rope_type"] == "default":
        return {**fields, "rotary_scaling_factor": 1.0}  # 1.0: scores are not rescaled
    if entry["rope_type"] != "yarn":
        raise UserError(
            f"rope_type {entry['rope_type']} of config.json: Megatron's latent attention has default or yarn"
        )
    scaled = {name.removeprefix("yarn_"): value for name, value in _yarn_fields(config, entry).items()}
    scaled.pop("correction_range_round_to_int")
    return {**fields, **scaled, "rope_type": "yarn", "mscale_all_dim": float(entry.get("mscale_all_dim") or 0.0)}


def moe_layers(config: HfConfig) -> tuple[int, ...]:
    dense = config.get("mlp_only_layers") or ()
    step, first = config.get("decoder_sparse_step") or 1, config.get("first_k_dense_replace") or 0
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    every = config.get("moe_layer_freq")
    if isinstance(every, list):
        return tuple(layer for layer, kind in enumerate(every) if kind)
    return tuple(
        layer for layer in all_layers(config) if layer >= first and layer not in dense and (layer + 1) % step == 0
    )


def num_experts(config: HfConfig) -> int:
    return int(require_field(config, "num_experts", "n_routed_experts", "num_local_experts"))


def moe_fields(config: HfConfig) -> Fields:
    """Fields of experts with a softmax router, without the load-balancing losses of pretraining."""
    sparse = set(moe_layers(config))
    return {
        "num_moe_experts": num_experts(config),
        "moe_layer_freq": [int(layer in sparse) for layer in all_layers(config)],
        "moe_ffn_hidden_size": require_field(config, "moe_intermediate_size", "intermediate_size"),
        "moe_router_topk": require_field(config, "num_experts_per_tok"),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": config.get("norm_topk_prob") is not True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
    }


def sigmoid_moe_fields(config: HfConfig) -> Fields:
    """Fields of experts with a sigmoid router and a correction bias, with expert groups and shared experts if any."""
    topk, groups, kept = (
        require_field(config, "num_experts_per_tok"),
        config.get("n_group") or 1,
        config.get("topk_group") or 1,
    )
    if config.get("norm_topk_prob") is False or topk == 1:
        raise UserError(
            "norm_topk_prob false or num_experts_per_tok 1 in config.json: Megatron's sigmoid router supports neither"
        )
    if groups > 1 and topk // kept != 2:
        raise UserError(
            f"num_experts_per_tok {topk} over topk_group {kept} in config.json: Megatron rates a group by its "
            f"{topk // kept} best experts, the model by its 2 best"
        )
    shared = (config.get("n_shared_experts") or 0) * require_field(config, "moe_intermediate_size")
    return {
        **moe_fields(config),
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor") or 1.0,
        **({"moe_router_num_groups": groups, "moe_router_group_topk": kept} if groups > 1 else {}),
        **({"moe_shared_expert_intermediate_size": shared} if shared else {}),
    }


def multi_token_layers(config: HfConfig) -> tuple[Ignored, ...]:
    """The multi-token prediction layers of a folder, which follow the layers that the model runs."""
    count = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
    first = int(require_field(config, "num_hidden_layers"))
    return tuple(Ignored(f"model.layers.{layer}.", BEYOND_NEXT) for layer in range(first, first + count))
