"""A model's answer as a message of OpenAI's, whole or in the pieces of a stream.

Invariant: the pieces of a stream, put together, are the message that the whole answer would have been, but for a call
that broke off after its name: its beginning was sent, and all of it follows as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.models.parsers.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    OutputParser,
    Reasoning,
    Text,
    gathered,
)
from slime.models.parsers.formats import Formats, make_parser


@dataclass(frozen=True)
class Reading:
    """How the answers to one chat are read. `opening` is the end of the prompt, where that begins a call already."""

    formats: Formats
    tools: Sequence[Mapping[str, Any]] = ()
    starts_in_reasoning: bool = False
    opening: str = ""

    @property
    def has_marks(self) -> bool:
        return self.formats != Formats()

    def reply(self) -> Reply:
        """An answer that begins."""
        if not self.has_marks:
            return Reply(None)
        parser = make_parser(self.formats, tools=self.tools, starts_in_reasoning=self.starts_in_reasoning)
        return Reply(parser, parser.feed(self.opening))


def reading_of(formats: Formats, given: Mapping[str, Any], *, separate_reasoning: bool) -> Reading:
    """Calls are looked for in chats with tools, and reasoning is told apart unless the request says otherwise."""
    tools = [] if given.get("tool_choice") == "none" else given.get("tools") or []
    if not tools:
        formats = replace(formats, tool=None)
    return Reading(formats if separate_reasoning else replace(formats, reasoning=None), tools)


class Reply:
    """One choice of an answer, from its text; without a parser the text is all there is."""

    def __init__(self, parser: OutputParser | None, told: Sequence[Event] = ()) -> None:
        self._parser = parser
        self._told = list(told)
        self._is_new = True
        self.calls = 0

    def message(self, text: str) -> dict[str, Any]:
        """The whole of it."""
        output = gathered(self._events(text, ends=True))
        message: dict[str, Any] = {"role": "assistant", "content": output.text}
        if output.reasoning is not None:
            message["reasoning_content"] = output.reasoning
        if output.calls:
            message["content"] = output.text or None
            message["tool_calls"] = [
                _call(place, call.id, call.name, call.arguments) for place, call in enumerate(output.calls)
            ]
        return message

    def delta(self, text: str, *, ends: bool) -> dict[str, Any]:
        """What is new with this text."""
        events = self._events(text, ends=ends)
        said = "".join(event.text for event in events if isinstance(event, Text))
        thought = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, CallBegun):
                calls[event.index] = _call(event.index, event.id, event.name, "")
            elif isinstance(event, CallArguments):
                call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
        delta: dict[str, Any] = {"role": "assistant"} if self._is_new else {}
        self._is_new = False
        delta["content"] = said if said or not (thought or calls) else None
        if thought:
            delta["reasoning_content"] = thought
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def _events(self, text: str, *, ends: bool) -> list[Event]:
        if self._parser is None:
            return [Text(text)]
        events = [*self._told, *self._parser.feed(text), *(self._parser.end() if ends else ())]
        self._told.clear()
        self.calls += sum(isinstance(event, CallEnded) for event in events)
        return events


def _call(index: int, id_: str, name: str, arguments: str) -> dict[str, Any]:
    return {"index": index, "id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
