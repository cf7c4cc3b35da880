"""Reads and checks a Hugging Face model folder before its model is built.

Invariant: nothing here imports model code, so the driver can refuse a folder before it starts any process.
"""

from __future__ import annotations

import json
from pathlib import Path

from slime.errors import UserError
from slime.storage.json_types import JsonObject


def read_config_json(folder: str | Path) -> JsonObject:
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


LONGEST_HEADER = 100_000_000


def read_safetensors_header(path: Path) -> tuple[JsonObject, JsonObject, int]:
    """The tensor entries and the metadata of a safetensors file, and the position of its first tensor byte.

    Raises OSError, or ValueError for another file; the entries themselves are not checked.
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(path.stat().st_size - 8, LONGEST_HEADER):
            raise ValueError(f"its header would have {length} bytes")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, header.pop("__metadata__", None) or {}, 8 + length


def block_size(config: JsonObject) -> tuple[int, int] | None:
    """The block size of 8-bit floats in a config.json; None for plain weights and other quantisations."""
    facts = quantization(config)
    match facts.get("weight_block_size"):
        case [int(down), int(across)] if facts.get("quant_method") == "fp8" and down > 0 and across > 0:
            return down, across
    return None


def read_text_config(folder: str | Path) -> JsonObject:
    """config.json, merged with its text config if it has one."""
    config = read_config_json(folder)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def quantization(config: JsonObject) -> JsonObject:
    """The quantisation entry of a config.json or of its text config; empty for plain weights."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        found = place.get("quantization_config")
        if isinstance(found, dict) and found:
            return found
    return {}


SAME_CODE = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Model types without code in transformers, and the model type whose code computes the same."""


def check_architecture(folder: str | Path, *, trust_remote_code: bool = False) -> JsonObject:
    """The raw config.json of a model that transformers supports, or that has its own code and may run it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    facts = read_config_json(folder)
    model_type = facts.get("model_type")
    known = model_type in SAME_CODE or model_type in CONFIG_MAPPING
    if not known and not (trust_remote_code and "auto_map" in facts):
        remedy = "pass --trust-remote-code" if "auto_map" in facts else "use a model that transformers knows"
        raise UserError(f"model folder {folder} has unknown model_type {model_type!r} in its config.json: {remedy}")
    return facts


def check_model(folder: str | Path, *, trust_remote_code: bool = False) -> None:
    """Raise a `UserError` for a model that transformers does not support, or that has another model's tokenizer."""
    facts = check_architecture(folder, trust_remote_code=trust_remote_code)
    vocab_size = (facts.get("text_config") or facts).get("vocab_size")
    if vocab_size is not None:
        check_tokenizer_fits(folder, vocab_size)


def check_tokenizer_fits(folder: str | Path, vocab_size: int) -> None:
    """Raise a `UserError` for a tokenizer that can emit ids which the embedding does not have."""
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
