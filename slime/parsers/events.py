"""What a parser says while a model writes, and the whole of it at the end.

Invariant: in the order of the events, reasoning, text and calls are what the model wrote, less the marks of its format. A
call that cannot be read becomes text, marks included: nothing that was written is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks."""

    text: str


@dataclass(frozen=True)
class Text:
    """A piece of what the model says."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """Call number `index` of this answer, whose name is complete; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of a call that has begun: of the text of one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class IllFormed:
    """What follows as text was meant as a call and cannot be read; `why` is for the log."""

    why: str


Event = Reasoning | Text | CallBegun | CallArguments | IllFormed


class OutputParser(Protocol):
    """Turns one answer into events, in pieces of any size."""

    def feed(self, text: str) -> list[Event]:
        """The events that are certain now that `text` was written too."""
        ...

    def end(self) -> list[Event]:
        """What was held back; nothing follows."""
        ...


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Output:
    """A whole answer. `reasoning` is None where the model did not think, and "" where it thought nothing."""

    reasoning: str | None = None
    text: str = ""
    calls: tuple[Call, ...] = ()
    ill_formed: bool = False


def gathered(events: Iterable[Event]) -> Output:
    """The whole answer that these events tell of."""
    reasoning: list[str] = []
    text: list[str] = []
    names: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    thought = ill_formed = False
    for event in events:
        match event:
            case Reasoning():
                thought = True
                reasoning.append(event.text)
            case Text():
                text.append(event.text)
            case CallBegun():
                names.append((event.id, event.name))
                arguments.append([])
            case CallArguments():
                arguments[event.index].append(event.text)
            case IllFormed():
                ill_formed = True
    calls = tuple(Call(id_, name, "".join(pieces)) for (id_, name), pieces in zip(names, arguments, strict=True))
    return Output("".join(reasoning) if thought else None, "".join(text), calls, ill_formed)
