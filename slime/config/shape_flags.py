"""Megatron's model-shape flags must agree with the Hugging Face config, which is what the model is built from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.config.config import Config
from slime.config.spec import flag_name
from slime.errors import UserError

_HF_NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "ffn_hidden_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk": ("num_experts_per_tok",),
}
"""Vocabulary sizes are left out: Megatron pads them."""


def check_shape_flags(config: Config) -> None:
    """Raise UserError with both numbers when a carried shape flag contradicts the model folder."""
    given = {name: config.carried[name] for name in _HF_NAMES if name in config.carried}
    if not given:
        return
    file = Path(config.hf_checkpoint) / "config.json"
    model = read_model_config(file)
    for name, value in given.items():
        hf_name, hf_value = _first_number(model, _HF_NAMES[name])
        if hf_value is not None and hf_value != value:
            raise UserError(
                f"{flag_name(name)} {value} contradicts {hf_name} {hf_value} in {file}: "
                "drop the flag or name the right model folder"
            )


def read_model_config(file: Path) -> dict[str, Any]:
    """config.json of a model folder; of a multimodal one the part about text."""
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


def _first_number(model: dict[str, Any], names: tuple[str, ...]) -> tuple[str, int | None]:
    for name in names:
        if isinstance(model.get(name), int):
            return name, model[name]
    return names[0], None
