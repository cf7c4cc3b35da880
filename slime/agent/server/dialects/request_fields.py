"""Fields of clients' request bodies, and the conversion of their contents to messages, tools and calls.

Invariants: an invalid value raises one `Problem` that names its place, and nothing else is raised. No returned text has
half a surrogate pair, which no tokenizer accepts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from slime.agent.messages import Message
from slime.agent.server.dialects.errors import Kind, Problem
from slime.models.openai_api import Field
from slime.storage.json_types import JsonObject

DEPTH = 64  # maximum nesting of a tool's schema, which is walked recursively
_TYPES = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}


def replace_surrogates(text: str) -> str:
    """Replace each half of a surrogate pair in the text by a replacement mark."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class BodyField(Field):
    """A JSON value of a client's request body."""

    __slots__ = ()

    def bad(self, why: str) -> Problem:
        return Problem(Kind.BAD_BODY, f"{self.path}: {why}", param=self.path)

    @staticmethod
    def described(value: object) -> str:
        return _TYPES.get(type(value), "nothing")

    def text_of(self, value: str) -> str:
        return replace_surrogates(value)

    def refuse_unknown_fields(self, used: Collection[str], neutral: Collection[str]) -> None:
        """Refuse unknown fields, unless they are null, false or empty and so have no effect."""
        for name, value in self.object().items():
            if name not in used and name not in neutral and value not in (None, [], {}, "", False):
                given = BodyField(value, replace_surrogates(str(name)))
                raise given.bad("this field is not known here: leave it out of the request")

    def text_or_texts(self) -> list[str]:
        return [self.text()] if isinstance(self.value, str) else self.texts()

    def sampling_params(self, numbers: Iterable[str], counts: Mapping[str, tuple[str, int]]) -> JsonObject:
        """The given sampling parameters, by SGLang's names: `numbers`, and `counts` with their least values."""
        params: JsonObject = {}
        for name in numbers:
            if (number := self[name].number()) is not None:
                params[name] = number
        for name, (ours, least) in counts.items():
            if (count := self[name].whole(least)) is not None:
                params[ours] = count
        return params

    def content(self, kinds: Collection[str], between: str = "\n") -> str:
        """Content as one text: a string, null, or a list of text parts. A single part equals its text."""
        if self.value is None or isinstance(self.value, str):
            return self.text("")
        return between.join(part.part(kinds) for part in self.items())

    def part(self, kinds: Collection[str]) -> str:
        """The text of one content part; its type must be one of `kinds`."""
        if isinstance(self.value, str):
            return self.text()
        kind = self["type"].text()
        if kind not in kinds:
            raise self["type"].bad(
                f"this model reads text only, and {kind!r} is not text: leave it out, or describe it in words"
            )
        return self["refusal" if kind == "refusal" else "text"].text()

    def result(self, kinds: Collection[str]) -> str:
        """The result of a tool call as text. Pictures are replaced by a note: the agent did not choose to get them."""
        if not isinstance(self.value, list):
            return self.content(kinds)
        texts = []
        for part in self.items():
            kind = part.value.get("type") if isinstance(part.value, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                texts.append(f"[{replace_surrogates(kind)} left out: this model reads text only]")
            else:
                texts.append(part.part(kinds))
        return "\n".join(texts)

    def json_text(self) -> str:
        """The arguments of a call as JSON text: text stays unchanged, a value is encoded."""
        if self.value is None or self.value == "":
            return "{}"
        return self.text() if isinstance(self.value, str) else json.dumps(self.plain(), ensure_ascii=False)

    def plain(self) -> object:
        """Copy the value with clean texts; refuses non-finite numbers and more than `DEPTH` levels."""

        def copied(value: object, depth: int) -> object:
            if depth > DEPTH:
                raise self.bad(f"is nested more than {DEPTH} deep")
            if isinstance(value, str):
                return replace_surrogates(value)
            if isinstance(value, dict):
                return {replace_surrogates(str(name)): copied(entry, depth + 1) for name, entry in value.items()}
            if isinstance(value, list):
                return [copied(entry, depth + 1) for entry in value]
            if isinstance(value, float) and not math.isfinite(value):
                raise self.bad("holds a number that is not finite")
            return value

        return copied(self.value, 0)

    def function_tool(self, name: str, schema: BodyField) -> JsonObject:
        """This tool in the form that chat templates read, under the name `name`."""
        function: JsonObject = {"name": name}
        if "description" in self:
            function["description"] = self["description"].text()
        function["parameters"] = {"type": "object", "properties": {}}
        if schema.value is not None:
            schema.object()
            function["parameters"] = schema.plain()
        return {"type": "function", "function": function}


def add_message(messages: list[Message], message: Message) -> None:
    """Append a message; consecutive assistant messages become one turn, unless their references differ."""
    last = messages[-1] if messages else None
    if last is None or not last.role == message.role == "assistant":
        messages.append(message)
        return
    if last.reference and message.reference and last.reference != message.reference:
        messages.append(message)
        return
    thoughts = [thought for thought in (last.reasoning, message.reasoning) if thought is not None]
    messages[-1] = replace(
        last,
        content=last.content + message.content,
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=last.tool_calls + message.tool_calls,
        reference=last.reference or message.reference,
    )


def parsed_arguments(arguments: str) -> JsonObject:
    """The parsed arguments of a call; an empty object if they are not a complete JSON object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def choice_notes(choice: str) -> tuple[str, ...]:
    """Notes about a tool choice that is not applied, because forced tokens would not be sampled tokens."""
    if choice in ("auto", "none"):
        return ()
    return (f"tool_choice {choice!r} is not forced on the model: what is trained on is sampled freely",)


def hosted_tool_note(kind: object, hosted: tuple[str, ...], company: str) -> str | None:
    """A note about a tool that only the company's own service runs and that is ignored; None for any other tool."""
    if not isinstance(kind, str) or not kind.startswith(hosted):
        return None
    return f"the tool {replace_surrogates(kind)!r} is run by {company}'s service and is ignored here"
