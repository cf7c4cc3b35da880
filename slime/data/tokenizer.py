"""Loading what a model folder says about text: its tokenizer and its context length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.errors import UserError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder (or hub name); a `UserError` when it has none."""
    folder = Path(path)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise UserError(
                f"{path}: has no tokenizer (no tokenizer.json or the like); copy the model's tokenizer there"
            )
    elif folder.exists() or folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise UserError(f"{path}: is no model folder; give a folder with config.json, weights and a tokenizer")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: its tokenizer does not load ({reason})") from error


def model_context_length(path: str) -> int | None:
    """`max_position_embeddings` of a local model folder; None when it does not say."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return None
    try:
        facts = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{config}: is not readable JSON ({error})") from error
    text_facts = facts.get("text_config") or facts
    length = text_facts.get("max_position_embeddings")
    return int(length) if length else None
