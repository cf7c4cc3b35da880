"""Events that a parser emits while a model writes, and the complete output that they add up to.

Invariant: in the order of the events, reasoning, text and calls are what the model wrote, without the marks of its
format and the white space next to them. A call that cannot be parsed becomes text, including its marks: no written text
is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's reasoning; an empty piece marks an empty reasoning block."""

    text: str


@dataclass(frozen=True)
class Text:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The start of call number `index` of this answer: its name is complete, its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of a call that has begun: part of the text of one JSON object.

    The last brace of that object is emitted only after the call was read to its end, so that a truncated call is never
    mistaken for a complete one.
    """

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """The end of a complete call: the pieces of its arguments, concatenated, are a JSON object."""

    index: int


@dataclass(frozen=True)
class IllFormed:
    """An attempted call that cannot be parsed and follows as text; `why` is for the log.

    With an `index`, that call had already begun and is retracted: it does not end, and all of it follows as text.
    """

    why: str
    index: int | None = None


Event = Reasoning | Text | CallBegun | CallArguments | CallEnded | IllFormed


class OutputParser(Protocol):
    """Turns one answer into events, from pieces of any size.

    The text is decoded with special tokens (`skip_special_tokens=False`), because the marks of several formats are
    special tokens. The token that ended the answer is optional: at the very end it is a mark.
    """

    def feed(self, text: str) -> list[Event]:
        """Append `text`; returns the events that are certain now."""
        ...

    def end(self) -> list[Event]:
        """End the answer; returns the events that were held back."""
        ...


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedOutput:
    """A complete answer. `reasoning` is None if there was no reasoning block, and "" if the block was empty."""

    reasoning: str | None = None
    text: str = ""
    calls: tuple[Call, ...] = ()
    ill_formed: bool = False


def gathered(events: Iterable[Event]) -> ParsedOutput:
    """Collect events into a complete answer, with the calls that ended."""
    reasoning: list[str] = []
    text: list[str] = []
    begun: dict[int, CallBegun] = {}
    arguments: dict[int, list[str]] = {}
    calls: list[Call] = []
    thought = ill_formed = False
    for event in events:
        match event:
            case Reasoning():
                thought = True
                reasoning.append(event.text)
            case Text():
                text.append(event.text)
            case CallBegun():
                begun[event.index], arguments[event.index] = event, []
            case CallArguments():
                arguments[event.index].append(event.text)
            case CallEnded():
                call = begun[event.index]
                calls.append(Call(call.id, call.name, "".join(arguments[event.index])))
            case IllFormed():
                ill_formed = True
    return ParsedOutput("".join(reasoning) if thought else None, "".join(text), tuple(calls), ill_formed)
