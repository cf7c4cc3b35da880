"""What a parser says while a model writes, and the whole of it at the end.

Invariant: in the order of the events, reasoning, text and calls are what the model wrote, less the marks of its format
and the white space beside them. A call that cannot be read becomes text, marks included: nothing that was written is
lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks; an empty one says that it thought nothing."""

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
    """A piece of the arguments of a call that has begun: of the text of one JSON object.

    The last brace of that object is told when the call was read to its end and not before, so that nobody takes a call
    that broke off for a whole one.
    """

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """The call is whole: the pieces of its arguments, put together, are a JSON object."""

    index: int


@dataclass(frozen=True)
class IllFormed:
    """What follows as text was meant as a call and cannot be read; `why` is for the log.

    With an `index`, that call had begun already and is taken back: it will not end, and all of it follows as text.
    """

    why: str
    index: int | None = None


Event = Reasoning | Text | CallBegun | CallArguments | CallEnded | IllFormed


class OutputParser(Protocol):
    """Turns one answer into events, in pieces of any size.

    The text is what the tokens decode to with special tokens in it (`skip_special_tokens=False`): the marks of several
    formats are special tokens. The token that ended the answer may be left out or not: at the very end it is a mark.
    """

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
    """The whole answer that these events tell of; of calls, those that ended."""
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
    return Output("".join(reasoning) if thought else None, "".join(text), tuple(calls), ill_formed)
