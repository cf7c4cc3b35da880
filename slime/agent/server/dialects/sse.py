"""Server-sent events, and a filter of the model's events for streams.

Invariants: text is sent as it is sampled, a call only when it has ended. A call that breaks off or cannot be parsed
becomes text; a client that had seen its beginning would run it, or send back a call that its session does not hold.
White space alone is never a block of its own: it is held back until text of the same kind follows, and dropped if none
follows before the next block. No client keeps a message of white space; several refuse one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from slime.models.parsers.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    IllFormed,
    Reasoning,
    Text,
)
from slime.storage.json_types import JsonMapping

KEEP_ALIVE_COMMENT = b": waiting\n\n"


def ascii_json(value: object) -> str:
    """Encode JSON in ASCII, so that no client takes a character of the text for the end of a line."""
    return json.dumps(value, separators=(",", ":"))


def data(value: JsonMapping) -> bytes:
    return f"data: {ascii_json(value)}\n\n".encode()


def named(value: JsonMapping) -> bytes:
    """Encode an event whose name is its type, as in the Responses and the Messages API."""
    return f"event: {value['type']}\ndata: {ascii_json(value)}\n\n".encode()


class VisibleEvents:
    """Filters the model's events for a client: passes on text, and calls once they have ended."""

    def __init__(self) -> None:
        self._inside: type | None = None
        self._waiting_for: type | None = None
        self._blank = ""
        self._begun: dict[int, CallBegun] = {}
        self._arguments: dict[int, list[str]] = {}

    def of(self, event: Event) -> Iterator[Event]:
        match event:
            case Reasoning() | Text():
                kind = type(event)
                if self._inside is kind:
                    if event.text:
                        yield event
                    return
                if self._waiting_for is not kind:
                    self._blank = ""
                self._waiting_for = kind
                text = self._blank + event.text
                if not text.strip():
                    self._blank = text
                    return
                self._inside, self._blank = kind, ""
                yield kind(text)
            case CallBegun():
                self._begun[event.index], self._arguments[event.index] = event, []
            case CallArguments():
                self._arguments[event.index].append(event.text)
            case CallEnded():
                self._inside, self._blank = None, ""
                yield self._begun[event.index]
                yield CallArguments(event.index, "".join(self._arguments[event.index]))
            case IllFormed():
                pass  # the call follows as text


def has_visible_text(text: str | None) -> bool:
    """True if a non-streamed answer includes this text: the counterpart of `Shown`."""
    return bool(text and text.strip())
