"""Builds `Sample` prototypes from dataset rows: validates prompts, labels and metadata.

Invariants: a prototype holds the prompt exactly as generation sees it (a string, messages if no chat template is
applied, or the raw row value if a user function reads it), and an invalid row is rejected with its place in the file.
The builder is a plain picklable value, so that worker processes build the same prototypes as the main process.

A consumer that needs a text label gets the text of the file: numbers and booleans are written as in JSON, and a
conversation counts as its assistant's message. Other objects and lists are rejected at their row where only text is
usable, and passed on unchanged to user functions.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import jinja2

from slime.data.chat_template import ASSISTANT, Message, is_conversation, normalize_messages
from slime.data.readers import LocatedRow, Row, lookup_key
from slime.data.sample import Sample
from slime.errors import UserError
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from argparse import Namespace

    from transformers import PreTrainedTokenizerBase

    from slime.config import Config

LabelUse = Literal["any", "answer", "target"]
"""`any`: a user function reads it. `answer`: a built-in verifier compares it. `target`: it is trained on."""

BY_RM_TYPE = "slime.rollout.evaluate.by_rm_type"
"""A `custom_rm_path` that selects the verifier named in the sample's metadata instead of the function of the flags."""

_BY_FUNCTION_OR_NOT_AT_ALL = ("ifbench", "remote_rm", "random")
_SUPERVISED = "slime.rollout.sft_rollout."


def label_use_of_run(args: Config | Namespace) -> LabelUse:
    """Return the label use that a run's flags imply."""
    if args.rollout_function_path.startswith(_SUPERVISED):
        return "target"
    own = args.custom_rm_path or args.custom_generate_function_path
    return "any" if own else label_use_of_verifier(args.rm_type)


def label_use_of_verifier(rm_type: str | None) -> LabelUse:
    """Return the label use that `--rm-type` implies; None (metadata or a function decides) accepts any label."""
    if rm_type is None or rm_type.removeprefix("boxed_") in _BY_FUNCTION_OR_NOT_AT_ALL:
        return "any"
    return "answer"


def normalize_label(label: object, use: LabelUse, where: str) -> object:
    """Return the label in the form for this use; a `UserError` names the row of an unusable label."""
    if use == "any" or label is None or isinstance(label, str | int | float):
        return label
    if is_conversation(label):
        messages = normalize_messages(label, f"{where}: label")
        if not any(message["role"] == ASSISTANT for message in messages):
            raise UserError(f"{where}: the label is a conversation without an assistant's message")
        return messages if use == "target" else _assistant_text(messages, where)
    if use == "target":
        raise UserError(f"{where}: the label must be a text or chat messages to train on, not {_kind(label)}")
    if isinstance(label, list) and bool(label) and all(isinstance(one, str | int | float) for one in label):
        return label
    raise UserError(
        f"{where}: the label must be a text, a number or a list of accepted answers, not {_kind(label)}; for other "
        "labels name a function with --custom-rm-path"
    )


def accepted(label: object) -> list[object]:
    """Return the accepted answers: the elements of a list label, or the label itself (also a conversation)."""
    return label if isinstance(label, list) and not is_conversation(label) else [label]


def label_text(label: object) -> str:
    """Return a label as text; of chat messages, the last assistant message."""
    if isinstance(label, str):
        return label
    if isinstance(label, bool | int | float):
        return json.dumps(label)
    if is_conversation(label):
        return _assistant_text(normalize_messages(label, "a label"), "a label")
    raise UserError(f"a label must be a text, a number or chat messages here, not {_kind(label)}")


def _assistant_text(messages: list[Message], where: str) -> str:
    said = [message["content"] for message in messages if message["role"] == ASSISTANT and message["content"]]
    if not said:
        raise UserError(f"{where}: the label is a conversation whose assistant messages are all empty")
    return said[-1]


def _kind(label: object) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", type(None): "null"}
    return f"{names.get(type(label), type(label).__name__)} ({json.dumps(label, default=str):.60})"


# Upper bounds for the tokens of an ASCII text: per character, and added at its edges.
_MOST_TOKENS_PER_CHARACTER = 4
_MOST_EDGE_TOKENS = 8

USUAL_PROMPT_KEY = "input"
_OUR_FUNCTIONS = "slime."
PROMPT_KEYS = (USUAL_PROMPT_KEY, "prompt", "messages", "question", "problem")
"""Common names of the prompt column in published files."""


@dataclass(frozen=True)
class BuiltPrototype:
    """A prototype and its number of prompt tokens; None if it is certainly within the limit."""

    where: str
    sample: Sample
    prompt_tokens: int | None


@dataclass(frozen=True)
class PrototypeBuilder:
    """Settings for reading rows (keys, chat template, length limit) and the methods that build prototypes."""

    tokenizer: PreTrainedTokenizerBase | None
    input_key: str | None
    """None: not known yet, see `with_prompt_key`."""
    label_key: str | None = None
    label_use: LabelUse = "any"
    metadata_key: str | None = None
    tool_key: str | None = None
    multimodal_keys: dict[str, str] = field(default_factory=dict)
    prompt_suffix: str | None = None
    """Appended to the last user message of each prompt."""
    apply_chat_template: bool = False
    apply_chat_template_kwargs: JsonObject = field(default_factory=dict)
    shortest_limit: int | None = None
    any_prompt: bool = False
    """Accept prompts other than text and messages, such as a task number, because user functions read them."""

    def __post_init__(self) -> None:
        if self.apply_chat_template and not self._has_template():
            name = "no tokenizer was given" if self.tokenizer is None else f"{self.tokenizer.name_or_path!r} has none"
            raise UserError(f"--apply-chat-template needs a tokenizer with a chat template; {name}")

    @property
    def columns(self) -> set[str]:
        """The keys that are read from a row."""
        prompts = PROMPT_KEYS if self.input_key is None else (self.input_key,)
        own = (self.label_key, self.metadata_key, self.tool_key, *self.multimodal_keys.values())
        return {key for key in (*prompts, *own) if key}

    def with_prompt_key(self, first: LocatedRow) -> PrototypeBuilder:
        """Return a builder with a prompt column: the given one, or the one found in the first row of a file."""
        if self.input_key is not None:
            return self
        found = [name for name in PROMPT_KEYS if name in first.row]
        if USUAL_PROMPT_KEY in found or not found:
            return replace(self, input_key=USUAL_PROMPT_KEY)
        if len(found) > 1:
            raise UserError(
                f"{first.where}: no key {USUAL_PROMPT_KEY!r}, and the prompt may be any of {', '.join(found)}: name "
                "it with "
                "--input-key"
            )
        return replace(self, input_key=found[0])

    def build_all(self, rows: Sequence[LocatedRow]) -> list[BuiltPrototype]:
        """Build prototypes in the order of the rows; prompts are tokenised in one batch."""
        samples = [self.build(located) for located in rows]
        counts = self.prompt_tokens(samples, [located.where for located in rows])
        return [
            BuiltPrototype(located.where, sample, count)
            for located, sample, count in zip(rows, samples, counts, strict=True)
        ]

    def build(self, located: LocatedRow) -> Sample:
        """Build the prototype of one row."""
        where, row = located.where, located.row
        for kind, key in self.multimodal_keys.items():
            if row.get(key) not in (None, "", []):
                raise UserError(
                    f"{where}: {key!r} holds the {kind} of this prompt (--multimodal-keys), but only text prompts are "
                    "supported: leave such rows out"
                )
        assert self.input_key is not None, "with_prompt_key was not called"
        prompt = _required(row, self.input_key, "--input-key", where)
        if isinstance(prompt, list):  # values that neither a chat template nor a tokenizer accepts
            for_function = bool(prompt) and not any(isinstance(one, dict) and "role" in one for one in prompt)
        else:
            for_function = isinstance(prompt, int | float | dict) and not isinstance(prompt, bool)
        is_readable = not (self.any_prompt and for_function)
        if is_readable:
            prompt = _checked_prompt(prompt, self.prompt_suffix, where)
        label: object = None
        if self.label_key:
            label = normalize_label(_required(row, self.label_key, "--label-key", where), self.label_use, where)
        metadata = self._metadata(row, where)
        if self.apply_chat_template and is_readable:
            if self.label_use == "target" and is_conversation(label) and len(label) > 1:
                raise UserError(
                    f"{where}: the label is a conversation of {len(label)} messages, which continues a prompt of "
                    "messages: drop --apply-chat-template, supervised training renders both together"
                )
            messages: list[Message] = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            prompt = self._render(messages, metadata.get("tools"), where)
        return Sample(
            prompt=prompt,
            label=label,
            metadata=metadata,
            apply_chat_template_kwargs=dict(self.apply_chat_template_kwargs),
        )

    def _metadata(self, row: Row, where: str) -> JsonObject:
        metadata = _parsed(row.get(self.metadata_key) if self.metadata_key else None, self.metadata_key, where)
        if metadata is None:
            metadata = {}
        if not isinstance(metadata, dict):
            raise UserError(f"{where}: {self.metadata_key!r} must be a JSON object, not {type(metadata).__name__}")
        tools = _parsed(row.get(self.tool_key) if self.tool_key else None, self.tool_key, where)
        if tools is None:
            return dict(metadata)
        if not isinstance(tools, list):
            raise UserError(f"{where}: {self.tool_key!r} must be a list of tool schemas, not {type(tools).__name__}")
        return {**metadata, "tools": tools}

    def _render(self, messages: list[Message], tools: list[object] | None, where: str) -> str:
        assert self.tokenizer is not None
        options = {"add_generation_prompt": True, **self.apply_chat_template_kwargs, "tokenize": False}
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools or None, **options)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise UserError(f"{where}: the chat template refuses this prompt ({error})") from error

    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))  # a user's tokenizer may lack the attribute

    def prompt_tokens(self, samples: Sequence[Sample], places: Sequence[str] | None = None) -> list[int | None]:
        """Count the tokens of each prompt; None for prompts certainly within the limit or not convertible to text."""
        counts: list[int | None] = [None] * len(samples)
        if self.shortest_limit is None or self.tokenizer is None:
            return counts
        texts: dict[int, str] = {}
        for position, sample in enumerate(samples):
            if isinstance(sample.prompt, str):
                text = sample.prompt
            elif is_conversation(sample.prompt) and self._has_template():
                where = f"prompt {position}" if places is None else places[position]
                text = self._render(sample.prompt, sample.metadata.get("tools"), where)
            else:
                continue
            most_tokens = len(text) * _MOST_TOKENS_PER_CHARACTER + _MOST_EDGE_TOKENS
            if not (text.isascii() and most_tokens < self.shortest_limit):
                texts[position] = text
        if texts:
            encoded = self.tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]
            for position, token_ids in zip(texts, encoded, strict=True):
                counts[position] = len(token_ids)
        return counts


def takes_any_prompt(args: Config | Namespace) -> bool:
    """True if user functions read the prompts of a run, so that prompts need not be text or messages."""
    paths = (args.rollout_function_path, args.data_source_path)
    return bool(args.custom_generate_function_path) or not all(path.startswith(_OUR_FUNCTIONS) for path in paths)


def _required(row: Row, key: str, flag: str, where: str) -> object:
    try:
        return lookup_key(row, key)
    except KeyError:
        inner = (f"{outer}.{name}" for outer, value in row.items() if isinstance(value, dict) for name in value)
        near = difflib.get_close_matches(key, [*row, *inner], n=1)
        hint = f"did you mean {flag} {near[0]}?" if near else f"choose one with {flag}"
        raise UserError(f"{where}: no key {key!r}; this row has {sorted(row)}; {hint}") from None


def _checked_prompt(prompt: object, suffix: str | None, where: str) -> str | list[Message]:
    """Validate a prompt and append the suffix to its text or to its last user message."""
    if isinstance(prompt, str) and prompt:
        return prompt + suffix if suffix else prompt
    if not isinstance(prompt, list) or not prompt:
        if prompt in ("", []):
            raise UserError(f"{where}: the prompt is empty")
        raise UserError(f"{where}: a prompt must be a string or a list of messages, not {type(prompt).__name__}")
    messages = normalize_messages(prompt, where)
    if not suffix:
        return messages
    said = [position for position, message in enumerate(messages) if message["role"] == "user"]
    if not said:
        raise UserError(f"{where}: --prompt-suffix is appended to the last user message, but this prompt has none")
    last = messages[said[-1]]
    return [*messages[: said[-1]], {**last, "content": f"{last['content']}{suffix}"}, *messages[said[-1] + 1 :]]


def _parsed(value: object, key: str | None, where: str) -> object:
    """Parse metadata or tools given as JSON text, the usual form in Parquet files."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: {key!r} is text but not valid JSON ({error.msg})") from error
