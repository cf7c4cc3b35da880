"""What a model folder says about text, its tokenizer and its context length, and prompts as token ids.

A prompt that is a string is taken as it is (special tokens included in the text, none added); messages are rendered
with the tokenizer's chat template first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.data.messages import checked_messages
from slime.data.sample import Sample
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


def load_tokenizer(path: str, trust_remote_code: bool = False, **options: Any) -> Any:
    """The tokenizer of a model folder (or hub name); a `UserError` when it has none. `options` are transformers'."""
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
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: its tokenizer does not load ({reason})") from error


def model_context_length(path: str) -> int | None:
    """`max_position_embeddings` of a local model folder; None when it does not say."""
    return _fact(path, "max_position_embeddings")


def model_vocab_size(path: str) -> int | None:
    """How many token ids the model of a local folder knows; None when it does not say."""
    return _fact(path, "vocab_size")


def ending_token_ids(tokenizer: Any, path: str) -> frozenset[int]:
    """The tokens that may end an answer: special ones, and what a local model folder has engines stop at."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = _read_json(Path(path) / "generation_config.json").get("eos_token_id")
    return frozenset({*tokenizer.all_special_ids, *added, *(ends if isinstance(ends, list) else [ends])} - {None})


def _fact(path: str, name: str) -> int | None:
    facts = _read_json(Path(path) / "config.json")
    value = (facts.get("text_config") or facts).get(name)
    return int(value) if value else None


def _read_json(file: Path) -> dict[str, Any]:
    """Nothing where there is no such file."""
    if not file.is_file():
        return {}
    try:
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: is not readable JSON ({error})") from error
    return facts


def render_messages(
    tokenizer: Any, sample: Sample, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool
) -> str:
    """The text of chat messages under the sample's tools and template arguments."""
    texts = checked_messages(messages, f"sample {sample.index}")
    options = {**sample.apply_chat_template_kwargs, "add_generation_prompt": add_generation_prompt, "tokenize": False}
    return tokenizer.apply_chat_template(texts, tools=sample.metadata.get("tools") or None, **options)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, nothing added."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_token_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """Token ids of a sample's prompt."""
    return encode(tokenizer, prompt_text(tokenizer, sample))


def prompt_text(tokenizer: Any, sample: Sample) -> str:
    """A sample's prompt as the text that is tokenised."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    if not isinstance(sample.prompt, list):
        raise ValueError(
            f"sample {sample.index}: its prompt {sample.prompt!r:.80} is neither text nor messages: a generate "
            "function must make them of it"
        )
    return render_messages(tokenizer, sample, sample.prompt, add_generation_prompt=True)
