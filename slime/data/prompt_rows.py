"""From a dataset row to a `Sample` prototype.

Invariant: a prototype holds the prompt exactly as generation will see it (a string, messages when no chat template was
asked for, or what the row holds where a function of the user reads it), and a row that cannot give one is refused with
its place in the file. The builder is a plain picklable value, so that worker processes make the same prototypes as the
main one.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jinja2

from slime.data.chat_template import ASSISTANT, checked_messages, is_conversation
from slime.data.readers import Row, chosen_columns, open_rows, parse_line, split_slice, value_at
from slime.data.sample import Sample
from slime.errors import UserError

# What a row's label may be, which depends on who reads it.
#
# Invariant: whoever needs a text gets the text that the file holds. Numbers and truth values are written as in JSON;
# chat messages stand for what the assistant says in them; other objects and lists are refused at their row, where only
# texts are of use, and handed on as they are to functions of the user.

LabelUse = Literal["any", "answer", "target"]
"""`any`: a user's function reads it. `answer`: a built-in verifier compares it. `target`: it is trained on."""

BY_RM_TYPE = "slime.rollout.evaluate.by_rm_type"
"""As a sample's `custom_rm_path`: the verifier that its metadata names judges, whatever function the flags name."""

_BY_FUNCTION_OR_NOT_AT_ALL = ("ifbench", "remote_rm", "random")
_SUPERVISED = "slime.rollout.sft_rollout."


def use_of_labels(args: Any) -> LabelUse:
    """What the flags of a run make of its labels."""
    if args.rollout_function_path.startswith(_SUPERVISED):
        return "target"
    own = args.custom_rm_path or args.custom_generate_function_path
    return "any" if own else use_by_verifier(args.rm_type)


def use_by_verifier(rm_type: str | None) -> LabelUse:
    """What `--rm-type` makes of labels; without one a row's metadata or a function decides."""
    if rm_type is None or rm_type.removeprefix("boxed_") in _BY_FUNCTION_OR_NOT_AT_ALL:
        return "any"
    return "answer"


def checked_label(label: Any, use: LabelUse, where: str) -> Any:
    """The label for this use; a `UserError` names the row of one that is of no use."""
    if use == "any" or label is None or isinstance(label, str | int | float):
        return label
    if is_conversation(label):
        messages = checked_messages(label, f"{where}: label")
        if not any(message["role"] == ASSISTANT for message in messages):
            raise UserError(f"{where}: the label is a conversation without an assistant's message")
        return messages if use == "target" else _assistant_text(messages, where)
    if use == "answer" and _is_choice(label):
        return label
    wanted = "a text or chat messages to train on"
    if use == "answer":
        wanted = "a text, a number or a list of accepted ones; --custom-rm-path names a function that may read others"
    raise UserError(f"{where}: the label must be {wanted}, not {_kind(label)}")


def accepted(label: Any) -> list[Any]:
    """The labels of which any will do: a list stands for them, unless it is a conversation."""
    return label if isinstance(label, list) and not is_conversation(label) else [label]


def label_text(label: Any) -> str:
    """A label as the text it is in its file; of chat messages, what the assistant says last."""
    if isinstance(label, str):
        return label
    if isinstance(label, bool | int | float):
        return json.dumps(label)
    if is_conversation(label):
        return _assistant_text(checked_messages(label, "a label"), "a label")
    raise UserError(f"a label must be a text, a number or chat messages here, not {_kind(label)}")


def _assistant_text(messages: list[dict[str, Any]], where: str) -> str:
    said = [message["content"] for message in messages if message["role"] == ASSISTANT and message["content"]]
    if not said:
        raise UserError(f"{where}: the label is a conversation in which the assistant says nothing")
    return said[-1]


def _is_choice(label: Any) -> bool:
    return isinstance(label, list) and bool(label) and all(isinstance(one, str | int | float) for one in label)


def _kind(label: Any) -> str:
    names = {dict: "an object", list: "a list", type(None): "null"}
    return f"{names.get(type(label), type(label).__name__)} ({json.dumps(label, default=str):.60})"


# No tokenizer makes more tokens of an ASCII text than this many per character, plus a few at its edges.
_MOST_TOKENS_PER_CHARACTER = 4
_MOST_EDGE_TOKENS = 8

USUAL_KEY = "input"
_OUR_FUNCTIONS = "slime."
PROMPT_KEYS = (USUAL_KEY, "prompt", "messages", "question", "problem")
"""The columns that hold prompts in published files."""


@dataclass(frozen=True)
class Located:
    """A row and where it came from."""

    where: str
    row: Row


@dataclass(frozen=True)
class Built:
    """A prototype and, where a limit made it worth counting, the number of its prompt tokens."""

    where: str
    sample: Sample
    prompt_tokens: int | None


@dataclass(frozen=True)
class PrototypeBuilder:
    """How rows are read: which keys, which template, which lengths matter."""

    tokenizer: Any
    input_key: str | None
    """None: see `with_prompt_key`."""
    label_key: str | None = None
    label_use: LabelUse = "any"
    metadata_key: str | None = None
    tool_key: str | None = None
    multimodal_keys: dict[str, str] = field(default_factory=dict)
    prompt_suffix: str | None = None
    """Follows what the user says last in each prompt."""
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    shortest_limit: int | None = None
    any_prompt: bool = False
    """Whether a prompt may be something else than text and messages, such as the number of a task: functions of the
    user read it."""

    def __post_init__(self) -> None:
        if self.apply_chat_template and not self._has_template():
            name = "no tokenizer was given" if self.tokenizer is None else f"{self.tokenizer.name_or_path!r} has none"
            raise UserError(f"--apply-chat-template needs a tokenizer with a chat template; {name}")

    @property
    def columns(self) -> set[str]:
        """The keys a row is asked for."""
        prompts = PROMPT_KEYS if self.input_key is None else (self.input_key,)
        own = (self.label_key, self.metadata_key, self.tool_key, *self.multimodal_keys.values())
        return {key for key in (*prompts, *own) if key}

    def with_prompt_key(self, first: Located) -> PrototypeBuilder:
        """This builder if it was told the column of the prompts; else one with that of a file which begins so."""
        if self.input_key is not None:
            return self
        found = [name for name in PROMPT_KEYS if name in first.row]
        if USUAL_KEY in found or not found:
            return replace(self, input_key=USUAL_KEY)
        if len(found) > 1:
            raise UserError(
                f"{first.where}: no key {USUAL_KEY!r}, and the prompt may be any of {', '.join(found)}: name it with "
                "--input-key"
            )
        return replace(self, input_key=found[0])

    def build_all(self, rows: Sequence[Located]) -> list[Built]:
        """Prototypes in the order of the rows, prompts counted together."""
        samples = [self.build(located) for located in rows]
        counts = self.prompt_tokens(samples, [located.where for located in rows])
        return [
            Built(located.where, sample, count) for located, sample, count in zip(rows, samples, counts, strict=True)
        ]

    def build(self, located: Located) -> Sample:
        """The prototype of one row."""
        where, row = located.where, located.row
        for kind, key in self.multimodal_keys.items():
            if row.get(key) not in (None, "", []):
                raise UserError(
                    f"{where}: {key!r} holds the {kind} of this prompt (--multimodal-keys), but prompts are text in "
                    "this version: leave such rows out"
                )
        assert self.input_key is not None, "with_prompt_key was not called"
        prompt = _required(row, self.input_key, "--input-key", where)
        is_readable = not (self.any_prompt and _is_for_a_function(prompt))
        if is_readable:
            prompt = _followed(_checked_prompt(prompt, where), self.prompt_suffix, where)
        label = self._label(row, where) if self.label_key else None
        metadata = self._metadata(row, where)
        if self.apply_chat_template and is_readable:
            _refuse_several_turns(label, self.label_use, where)
            prompt = self._render(_as_messages(prompt), metadata.get("tools"), where)
        return Sample(
            prompt=prompt,
            label=label,
            metadata=metadata,
            apply_chat_template_kwargs=dict(self.apply_chat_template_kwargs),
        )

    def _label(self, row: Row, where: str) -> Any:
        assert self.label_key is not None
        return checked_label(_required(row, self.label_key, "--label-key", where), self.label_use, where)

    def _metadata(self, row: Row, where: str) -> dict[str, Any]:
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

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, where: str) -> str:
        options = {"add_generation_prompt": True, **self.apply_chat_template_kwargs, "tokenize": False}
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools or None, **options)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise UserError(f"{where}: the chat template refuses this prompt ({error})") from error

    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))  # one of a user's own making may know none

    def prompt_tokens(self, samples: Sequence[Sample], places: Sequence[str] | None = None) -> list[int | None]:
        """How many tokens each prompt has; None for those that are surely within the limit, or are no text here."""
        counts: list[int | None] = [None] * len(samples)
        if self.shortest_limit is None or self.tokenizer is None:
            return counts
        texts: dict[int, str] = {}
        for position, sample in enumerate(samples):
            text = self._text(sample, f"prompt {position}" if places is None else places[position])
            if text is not None and not _surely_shorter(text, self.shortest_limit):
                texts[position] = text
        if texts:
            encoded = self.tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]
            for position, token_ids in zip(texts, encoded, strict=True):
                counts[position] = len(token_ids)
        return counts

    def _text(self, sample: Sample, where: str) -> str | None:
        """What will be tokenised for this prompt; None for what is no text, nor messages that can be rendered here."""
        if isinstance(sample.prompt, str):
            return sample.prompt
        if not is_conversation(sample.prompt) or not self._has_template():
            return None
        return self._render(sample.prompt, sample.metadata.get("tools"), where)


def takes_any_prompt(args: Any) -> bool:
    """Whether functions of the user read the prompts of a run, so that these need not be text or messages."""
    paths = (args.rollout_function_path, args.data_source_path)
    return bool(args.custom_generate_function_path) or not all(path.startswith(_OUR_FUNCTIONS) for path in paths)


def _is_for_a_function(prompt: Any) -> bool:
    """Whether a prompt is a value that no chat template and no tokenizer takes: a number, an object, a list of such."""
    if isinstance(prompt, list):
        return bool(prompt) and not any(isinstance(one, dict) and "role" in one for one in prompt)
    return isinstance(prompt, int | float | dict) and not isinstance(prompt, bool)


def _surely_shorter(text: str, limit: int) -> bool:
    return text.isascii() and len(text) * _MOST_TOKENS_PER_CHARACTER + _MOST_EDGE_TOKENS < limit


def _required(row: Row, key: str, flag: str, where: str) -> Any:
    try:
        return value_at(row, key)
    except KeyError:
        near = difflib.get_close_matches(key, _paths(row), n=1)
        hint = f"did you mean {flag} {near[0]}?" if near else f"choose one with {flag}"
        raise UserError(f"{where}: no key {key!r}; this row has {sorted(row)}; {hint}") from None


def _paths(row: Row) -> list[str]:
    """The keys of a row, and those inside its objects."""
    inner = (f"{key}.{name}" for key, value in row.items() if isinstance(value, dict) for name in value)
    return [*row, *inner]


def _followed(prompt: str | list[dict[str, Any]], suffix: str | None, where: str) -> str | list[dict[str, Any]]:
    if not suffix:
        return prompt
    if isinstance(prompt, str):
        return prompt + suffix
    said = [position for position, message in enumerate(prompt) if message["role"] == "user"]
    if not said:
        raise UserError(f"{where}: --prompt-suffix follows what a user says, and this prompt has no user's message")
    last = prompt[said[-1]]
    return [*prompt[: said[-1]], {**last, "content": f"{last['content']}{suffix}"}, *prompt[said[-1] + 1 :]]


def _checked_prompt(prompt: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        return checked_messages(prompt, where)
    if prompt in ("", []):
        raise UserError(f"{where}: the prompt is empty")
    raise UserError(f"{where}: a prompt must be a string or a list of messages, not {type(prompt).__name__}")


def _refuse_several_turns(label: Any, use: LabelUse, where: str) -> None:
    if use == "target" and is_conversation(label) and len(label) > 1:
        raise UserError(
            f"{where}: the label is a conversation of {len(label)} messages, which goes on from a prompt of messages: "
            "drop --apply-chat-template, supervised training renders both together"
        )


def _as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _parsed(value: Any, key: str | None, where: str) -> Any:
    """Metadata and tools may come as JSON text, which is how Parquet files often hold them."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: {key!r} is text but not valid JSON ({error.msg})") from error


# The first rows of a prompt file, for whoever wants to know what is in it before reading it whole.
#
# Invariant: rows and their places are those that `open_rows` gives, and a bounded part of the file is read: a look at
# a file of any size takes milliseconds. Only a slice that counts from the end is found by going through the file.

MOST_ROWS = 100
MOST_BYTES = 1_000_000


def read_first_rows(path: str, *, columns: set[str], most_rows: int = MOST_ROWS) -> list[Located]:
    """Up to `most_rows` rows of a JSONL or Parquet file, `path@[a:b]` included; at least one, or a `UserError`."""
    file, chosen = split_slice(path)
    start, stop = chosen.start or 0, chosen.stop
    if stop is not None and stop >= 0:
        most_rows = min(most_rows, stop - start)
    if start < 0 or (stop is not None and stop < 0) or most_rows <= 0:
        return _indexed(path, columns, most_rows)
    if Path(file).suffix == ".jsonl":
        rows = list(itertools.islice(_lines(Path(file), start), most_rows))
    elif Path(file).suffix == ".parquet":
        rows = list(itertools.islice(_batches(Path(file), start, columns, most_rows), most_rows))
    else:
        return _indexed(path, columns, most_rows)
    if not rows:
        raise UserError(f"prompt data {path}: has no rows")
    return rows


def count_rows(path: str) -> int:
    """How many rows the file, or the slice of it, has."""
    return len(open_rows(path, columns=set()))


def _lines(file: Path, start: int) -> Iterator[Located]:
    read, skipped = 0, 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                if skipped < start:
                    skipped += 1
                    continue
                where = f"{file}:{number}"
                yield Located(where, parse_line(line, where))
                read += len(line)
                if read >= MOST_BYTES:
                    return
    except OSError as error:
        raise UserError(f"prompt data {file}: cannot be read ({error.strerror})") from error


def _batches(file: Path, start: int, columns: set[str], most_rows: int) -> Iterator[Located]:
    """Rows of a Parquet file from the row group on that has the first one; columns not asked for are None."""
    import pyarrow
    import pyarrow.parquet

    try:
        source = pyarrow.parquet.ParquetFile(file)
        names = source.schema_arrow.names
        wanted = chosen_columns(names, columns) or names
        first, group = 0, 0
        while group < source.num_row_groups and first + source.metadata.row_group(group).num_rows <= start:
            first += source.metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, source.num_row_groups))
        absent = {name: None for name in names if name not in wanted}
        for batch in source.iter_batches(batch_size=most_rows, row_groups=groups, columns=wanted) if groups else ():
            for row in batch.to_pylist():
                if first >= start:
                    yield Located(f"{file}: row {first}", absent | row)
                first += 1
    except (OSError, pyarrow.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"prompt data {file}: cannot be read as Parquet ({reason})") from error


def _indexed(path: str, columns: set[str], most_rows: int) -> list[Located]:
    rows = open_rows(path, columns=columns)
    return [Located(rows.where(index), rows[index]) for index in range(min(max(most_rows, 1), len(rows)))]
