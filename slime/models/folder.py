"""What can be said of a Hugging Face model folder before its model is built.

Invariant: nothing here imports model code, so the driver can refuse a folder before any process is started.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.errors import UserError


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """The raw config.json of a model folder."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UserError(f"model folder {folder} does not exist: give the path of a Hugging Face model folder")
    if not path.is_file():
        raise UserError(f"model folder {folder} has no config.json: give the path of a Hugging Face model folder")
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError) as cause:
        raise UserError(f"{path} cannot be read as JSON ({cause}): download the model folder again") from cause
    if not isinstance(facts, dict):
        raise UserError(f"{path} does not hold a JSON object: download the model folder again")
    return facts


def block_size(config: dict[str, Any]) -> tuple[int, int] | None:
    """The block size that a config.json names; None for plain weights and other quantisations."""
    facts = quantization(config)
    match facts.get("weight_block_size"):
        case [int(down), int(across)] if facts.get("quant_method") == "fp8" and down > 0 and across > 0:
            return down, across
    return None


def read_text_config(folder: str | Path) -> dict[str, Any]:
    """config.json with its part about text, where it has one, folded in."""
    config = read_config_json(folder)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says of quantisation, also in its part about text; nothing for plain weights."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        found = place.get("quantization_config")
        if isinstance(found, dict) and found:
            return found
    return {}


SAME_CODE = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Model types that transformers has no code for under their own name, and whose models compute what another's do."""


def check_architecture(folder: str | Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The raw config.json of a model that transformers knows, or that brings its own code and may run it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    facts = read_config_json(folder)
    model_type = facts.get("model_type")
    known = model_type in SAME_CODE or model_type in CONFIG_MAPPING
    if not known and not (trust_remote_code and "auto_map" in facts):
        remedy = "pass --trust-remote-code" if "auto_map" in facts else "use a model that transformers knows"
        raise UserError(f"model folder {folder} has unknown model_type {model_type!r} in its config.json: {remedy}")
    return facts


def check_model(folder: str | Path, *, trust_remote_code: bool = False) -> None:
    """Raise a `UserError` for a model that transformers does not know, or with another model's tokenizer."""
    facts = check_architecture(folder, trust_remote_code=trust_remote_code)
    vocab_size = (facts.get("text_config") or facts).get("vocab_size")
    if vocab_size is not None:
        check_tokenizer_fits(folder, vocab_size)


def check_tokenizer_fits(folder: str | Path, vocab_size: int) -> None:
    """A tokenizer that can emit ids the embedding does not have is refused before training starts."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return
    try:
        facts = json.loads(path.read_text())
        vocab = facts["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        largest = max([-1, *ids, *(token["id"] for token in facts.get("added_tokens") or [])])
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise UserError(f"{path} is not a readable tokenizer file ({first_line(cause)})") from cause
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer in {folder} has ids up to {largest} but the model's vocab_size is {vocab_size}: "
            "tokenizer and model do not belong together"
        )


def first_line(cause: BaseException) -> str:
    text = str(cause).strip()
    return text.splitlines()[0] if text else type(cause).__name__
