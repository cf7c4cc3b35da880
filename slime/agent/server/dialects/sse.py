"""Server-sent events, and what of the model's events a client is to see.

Invariant: white space alone is never a block of its own: it waits for the text it belongs to, and where none follows
before the next thing, it is left out. No client keeps a message of white space; several refuse one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slime.parsers.events import CallArguments, Event, IllFormed, Reasoning, Text

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
    """The events that a client sees of those that the model makes."""

    def __init__(self) -> None:
        self._inside: type | None = None
        self._waiting_for: type | None = None
        self._blank = ""

    def of(self, event: Event) -> Iterator[Event]:
        if isinstance(event, IllFormed) or (isinstance(event, CallArguments) and not event.text):
            return
        if not isinstance(event, Reasoning | Text):
            self._inside, self._blank = None, ""
            yield event
            return
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
