"""Tokenizers and chat templates: load them from a model folder, validate and render messages, encode prompts.

A string prompt is tokenised as it is: special tokens in the text count, none are added. Messages are first rendered
with the tokenizer's chat template. `preview_template` renders without loading the tokenizer, for display only.

Invariant: a message's content is text (or absent next to tool calls) before a template sees it; never a list or an
object, which most templates print in Python notation. Text parts are joined unchanged; other parts are rejected, since
the supported models read only text.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slime.data.sample import Sample
from slime.errors import UserError
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = JsonObject

ASSISTANT = "assistant"
_TEXT_PARTS = ("text", "input_text", "output_text")


def normalize_messages(messages: Sequence[object], where: str) -> list[Message]:
    """Return the messages with text contents; a `UserError` names an invalid message."""
    normalized: list[Message] = []
    for number, message in enumerate(messages):
        place = f"{where}: message {number}"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{place}: a chat message must be an object with a 'role' and a 'content', not {message!r:.80}"
            )
        # Parquet gives every message the keys of all messages; an absent key and a null one mean the same.
        known = {key: value for key, value in message.items() if value is not None}
        content = known.get("content")
        if content is None:
            if message["role"] != ASSISTANT:
                raise UserError(f"{place}: the {message['role']} message is empty: give it a 'content'")
            # Templates read the content of a turn without tool calls and would print None.
            content = None if "tool_calls" in known else ""
        elif isinstance(content, list):
            content = "".join(_part_text(part, place) for part in content)
        elif not isinstance(content, str):
            raise UserError(f"{place}: 'content' must be text or a list of parts, not {type(content).__name__}")
        normalized.append({**known, "content": content})
    return normalized


def is_conversation(value: object) -> TypeGuard[list[Message]]:
    """True for a non-empty list of objects with roles, that is, chat messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise UserError(f"{where}: a part of 'content' must be an object with a 'type', not {part!r:.80}")
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise UserError(f"{where}: has a part of type {kind!r}, but only text is supported: leave it out")
    if not isinstance(part.get("text"), str):
        raise UserError(f"{where}: a part of type {kind!r} has no 'text': {part!r:.80}")
    return part["text"]


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
)


def load_tokenizer(path: str, trust_remote_code: bool = False, **options: object) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name; a `UserError` if it has none. `options` are transformers'."""
    folder = Path(path)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise UserError(
                f"{path}: has no tokenizer (no tokenizer.json or the like); copy the model's tokenizer there"
            )
    elif folder.exists() or folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise UserError(f"{path}: not a model folder; give a folder with config.json, weights and a tokenizer")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: its tokenizer does not load ({reason})") from error


def model_context_length(path: str) -> int | None:
    """Read `max_position_embeddings` from a local model folder; None if it is not specified."""
    return _fact(path, "max_position_embeddings")


def model_vocab_size(path: str) -> int | None:
    """Read the number of token ids from a local model folder; None if it is not specified."""
    return _fact(path, "vocab_size")


def ending_token_ids(tokenizer: PreTrainedTokenizerBase, path: str) -> frozenset[int]:
    """Return the tokens that may end an answer: special tokens, and the stop tokens of a local model folder."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = _read_json(Path(path) / "generation_config.json").get("eos_token_id")
    return frozenset({*tokenizer.all_special_ids, *added, *(ends if isinstance(ends, list) else [ends])} - {None})


def _fact(path: str, name: str) -> int | None:
    facts = _read_json(Path(path) / "config.json")
    value = (facts.get("text_config") or facts).get(name)
    return int(value) if value else None


def _read_json(file: Path) -> JsonObject:
    """Read a JSON object; a missing file is an empty one."""
    if not file.is_file():
        return {}
    try:
        facts: JsonObject = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: is not readable JSON ({error})") from error
    return facts


def render_messages(
    tokenizer: PreTrainedTokenizerBase, sample: Sample, messages: Sequence[Message], *, add_generation_prompt: bool
) -> str:
    """Render chat messages with the sample's tools and template arguments."""
    texts = normalize_messages(messages, f"sample {sample.index}")
    options = {**sample.apply_chat_template_kwargs, "add_generation_prompt": add_generation_prompt, "tokenize": False}
    return tokenizer.apply_chat_template(texts, tools=sample.metadata.get("tools") or None, **options)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a text without adding special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_token_ids(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    """Return the token ids of a sample's prompt."""
    return encode(tokenizer, prompt_text(tokenizer, sample))


def prompt_text(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    """Return the text of a sample's prompt, as it is tokenised."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    if not isinstance(sample.prompt, list):
        raise ValueError(
            f"sample {sample.index}: its prompt {sample.prompt!r:.80} is neither text nor messages: a generate "
            "function must convert it"
        )
    return render_messages(tokenizer, sample, sample.prompt, add_generation_prompt=True)


def preview_template(
    folder: str | Path, messages: Sequence[Message], *, tools: list[JsonObject] | None, options: JsonObject
) -> str | None:
    """Render messages with the folder's chat template, in milliseconds and without loading the tokenizer.

    For display only: None without a template, or if it needs more than plain Jinja. Generation uses the tokenizer.
    """
    folder = Path(folder)
    try:
        facts = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        facts = {}
    if not isinstance(facts, dict):
        facts = {}
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else facts.get("chat_template")
    if isinstance(template, list):
        entries = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = entries.get("default")
    if not isinstance(template, str):
        return None
    special_tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = facts.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special_tokens[name] = text

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    values = {"messages": list(messages), "tools": tools or None, "add_generation_prompt": True, **options}
    try:
        return environment.from_string(template).render(**special_tokens, **values)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return None
