"""Checks that Megatron's model flags agree with the Hugging Face config that the model is built from.

Invariant: a flag whose number differs from config.json is refused with both numbers; values that config.json does not
have are not compared.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from slime.config.config import Config
from slime.config.fields import flag_name
from slime.errors import UserError
from slime.storage.json_types import JsonObject

COMPARED_SHAPE_KEYS: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "ffn_hidden_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_router_num_groups": ("n_group",),
    "moe_router_group_topk": ("topk_group",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "linear_num_key_heads": ("linear_num_key_heads",),
    "linear_num_value_heads": ("linear_num_value_heads",),
    "linear_key_head_dim": ("linear_key_head_dim",),
    "linear_value_head_dim": ("linear_value_head_dim",),
    "linear_conv_kernel_dim": ("linear_conv_kernel_dim",),
    "dsa_indexer_n_heads": ("index_n_heads",),
    "dsa_indexer_head_dim": ("index_head_dim",),
    "dsa_indexer_topk": ("index_topk",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "layernorm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "rotary_base": ("rope_theta",),
    "rotary_percent": ("partial_rotary_factor",),
    "rotary_scaling_factor": ("factor",),
    "rope_scaling_factor": ("factor",),
}
"""Megatron's name -> the names in config.json."""

_PADDED = {"vocab_size": ("vocab_size",), "max_position_embeddings": ("max_position_embeddings",)}
"""Not compared: Megatron pads vocabularies, and with rotary positions the longest sequence has no effect."""

_ONLY_NAMES_WITH_LATENT_ATTENTION = ("head_dim", "num_key_value_heads")


def check_shape_flags(config: Config) -> None:
    """Raise a `UserError` with both numbers if a carried shape flag contradicts the model folder."""
    compared = (*COMPARED_SHAPE_KEYS, "untie_embeddings_and_output_weights")
    given = {name: config.carried[name] for name in compared if name in config.carried}
    if not given:
        return
    file = Path(config.hf_checkpoint) / "config.json"
    model = read_model_config(file)
    facts = {**model, **_rotary_settings(model)}
    if "kv_lora_rank" in model:
        facts = {name: value for name, value in facts.items() if name not in _ONLY_NAMES_WITH_LATENT_ATTENTION}
    for name, value in given.items():
        hf_name, hf_value = _first_number(facts, COMPARED_SHAPE_KEYS.get(name, ()))
        if hf_value is not None and not math.isclose(hf_value, value, rel_tol=1e-6):
            raise UserError(
                f"{flag_name(name)} {value} contradicts {hf_name} {hf_value} in {file}: "
                "drop the flag or name the right model folder"
            )
    if given.get("untie_embeddings_and_output_weights") and model.get("tie_word_embeddings") is True:
        raise UserError(
            f"--untie-embeddings-and-output-weights contradicts tie_word_embeddings true in {file}: drop the flag or "
            "name the right model folder"
        )


def check_has_routers(config: Config) -> None:
    """Raise a `UserError` if routing replay is on and the model has no routers."""
    if not config.use_routing_replay:
        return
    file = Path(config.hf_checkpoint) / "config.json"
    if _first_number(read_model_config(file), COMPARED_SHAPE_KEYS["num_experts"])[1] is None:
        flag = "--use-rollout-routing-replay" if config.use_rollout_routing_replay else "--use-routing-replay"
        raise UserError(f"{flag} repeats the choices of routers, but the model of {file} has none: drop the flag")


def read_model_shape(file: Path) -> dict[str, float]:
    """Read the shape of a model from its config.json, under Megatron's names."""
    model = read_model_config(file)
    found = {
        name: _first_number({**model, **_rotary_settings(model)}, keys)[1]
        for name, keys in {**COMPARED_SHAPE_KEYS, **_PADDED}.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def _rotary_settings(model: JsonObject) -> JsonObject:
    """Return the rotary settings that newer config files keep in a nested entry."""
    found: JsonObject = {}
    for entry in (model.get("rope_scaling"), model.get("rope_parameters")):
        if isinstance(entry, dict):
            found |= {name: entry[name] for name in ("rope_theta", "partial_rotary_factor", "factor") if name in entry}
    return found


def read_model_config(file: Path) -> JsonObject:
    """Read config.json of a model folder; of a multimodal model only the part about text."""
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"model folder {file.parent} has no config.json: --hf-checkpoint needs a Hugging Face folder"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if not isinstance(model, dict):
        raise UserError(f"{file} does not hold a JSON object: --hf-checkpoint needs a Hugging Face folder")
    text = model.get("text_config")
    return text if isinstance(text, dict) else model


def _first_number(model: JsonObject, names: tuple[str, ...]) -> tuple[str, float | None]:
    for name in names:
        if isinstance(model.get(name), int | float) and not isinstance(model[name], bool):
            return name, model[name]
    return next(iter(names), ""), None
