"""What a model folder says about text, its tokenizer and its context length, and prompts as token ids.

A prompt that is a string is taken as it is (special tokens included in the text, none added); messages are rendered
with the tokenizer's chat template first.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slime.data.sample import Sample
from slime.errors import UserError

# Chat messages as they come from files and plugins, made into what a chat template renders as it was meant.
#
# Invariant: the content of a message is a text (or absent beside tool calls) before a template sees it; never a list
# or an object, which most templates print in Python's own notation. Parts of text are joined as they stand; what is no
# text is refused, since the models here read text alone.

Message = dict[str, Any]

ASSISTANT = "assistant"
_TEXT_PARTS = ("text", "input_text", "output_text")


def checked_messages(messages: Sequence[Any], where: str) -> list[Message]:
    """The messages with their contents as texts; a `UserError` says what is wrong with which."""
    return [_checked_message(message, f"{where}: message {number}") for number, message in enumerate(messages)]


def is_conversation(value: Any) -> bool:
    """Whether a value is meant as chat messages: a list of objects with roles."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def _checked_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"{where}: a chat message must be an object with a 'role' and a 'content', not {message!r:.80}")
    # Parquet gives every message the keys of all messages; an absent key and a null one mean the same.
    known = {key: value for key, value in message.items() if value is not None}
    content = known.get("content")
    if content is not None:
        return {**known, "content": _content_text(content, where)}
    if message["role"] != ASSISTANT:
        raise UserError(f"{where}: the {message['role']} says nothing: give it a 'content'")
    # Templates ask for the content of a turn without tool calls and would print None.
    return {**known, "content": None if "tool_calls" in known else ""}


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}: 'content' must be text or a list of parts, not {type(content).__name__}")
    return "".join(_part_text(part, where) for part in content)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise UserError(f"{where}: a part of 'content' must be an object with a 'type', not {part!r:.80}")
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise UserError(f"{where}: holds a part of type {kind!r}; this version reads text alone: leave it out")
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


# A chat template rendered without loading the tokenizer: what a plan can show of a prompt in milliseconds.
#
# Good for a look only. What a template needs beyond plain Jinja gives None here; generation uses the tokenizer itself.


def preview_template(
    folder: str | Path, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None, options: dict[str, Any]
) -> str | None:
    """The messages as the folder's chat template writes them; None without a template that renders here."""
    facts = _read_config(Path(folder) / "tokenizer_config.json")
    template = _template(Path(folder), facts)
    if template is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    values = {"messages": list(messages), "tools": tools or None, "add_generation_prompt": True, **options}
    try:
        return environment.from_string(template).render(**_special_tokens(facts), **values)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return None


def _template(folder: Path, facts: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = facts.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(facts: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = facts.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_config(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
