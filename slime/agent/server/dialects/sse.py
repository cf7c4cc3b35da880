"""Server-sent events, and what of the model's events a client is to see.

Invariant: words are shown as they are sampled, a call when it has ended: one that breaks off or cannot be read becomes
text, and a client that had seen its beginning would run it, or send back a call that its session does not hold. White
space alone is never a block of its own: it waits for the text it belongs to, and where none follows before the next
thing, it is left out. No client keeps a message of white space; several refuse one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slime.models.parsers.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    IllFormed,
    Reasoning,
    Text,
)

COMMENT = b": waiting\n\n"


def dumped(value: Any) -> str:
    """JSON in ASCII: no client takes a character of the text for the end of a line."""
    return json.dumps(value, separators=(",", ":"))


def data(value: Mapping[str, Any]) -> bytes:
    return f"data: {dumped(value)}\n\n".encode()


def named(value: Mapping[str, Any]) -> bytes:
    """An event whose name is its type, as the Responses and the Messages API have them."""
    return f"event: {value['type']}\ndata: {dumped(value)}\n\n".encode()


class Shown:
    """The events that a client sees of those that the model makes: calls that ended, and words."""

    def __init__(self) -> None:
        self._inside: type | None = None
        self._waiting_for: type | None = None
        self._blank = ""
        self._begun: dict[int, CallBegun] = {}
        self._arguments: dict[int, list[str]] = {}

    def of(self, event: Event) -> Iterator[Event]:
        match event:
            case Reasoning() | Text():
                yield from self._words(event)
            case CallBegun():
                self._begun[event.index], self._arguments[event.index] = event, []
            case CallArguments():
                self._arguments[event.index].append(event.text)
            case CallEnded():
                self._inside, self._blank = None, ""
                yield self._begun[event.index]
                yield CallArguments(event.index, "".join(self._arguments[event.index]))
            case IllFormed():
                pass  # what the model wrote follows as text

    def _words(self, event: Reasoning | Text) -> Iterator[Event]:
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


def worth_showing(text: str | None) -> bool:
    """Whether a whole answer has this text: the counterpart of `Shown`."""
    return bool(text and text.strip())
