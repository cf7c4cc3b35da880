"""What a chat template takes and how it ends a turn, found by showing it small conversations.

Invariant: no family is known here. A form that the template refuses, or under which a text is missing, doubled or out
of its place, is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from slime.agent.messages import Message, ToolCall
from slime.agent.session.rendering import Renderer, TemplateRefused
from slime.agent.session.shape import Shape
from slime.agent.session.special_text import SpecialText

A, B, C, D = "Qanary", "Bzebra", "Cyclamen", "Dromedar"
"""Words that no template contains."""
_LONG_ID = "call_0f8e4a1c2b3d4e5f60718293"
_MORE_ENDS = ("<|eom_id|>",)
"""Tokens that end a turn, but are written by templates for tools of their own only."""
Conversation = tuple[Message, ...]


def tool(name: str) -> dict[str, Any]:
    """A tool of a stand-in conversation."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def said(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    """An assistant's message."""
    return Message("assistant", text, reasoning, calls)


def asked(text: str) -> Message:
    return Message("user", text)


def call(value: str, id_: str = "abc123XYZ") -> ToolCall:
    return ToolCall(id_, "look", f'{{"place": "{value}"}}')


def result(text: str, id_: str = "abc123XYZ") -> Message:
    return Message("tool", text, tool_call_id=id_)


def system(text: str) -> Message:
    return Message("system", text)


def in_order(text: str, words: Iterable[str]) -> bool:
    """Whether each word is in the text once, one after the other."""
    places = [text.find(word) if text.count(word) == 1 else -1 for word in words]
    return -1 not in places and places == sorted(places)


PARALLEL = (call(B), call(C, "abc123XYW"))
RESULTS = (result(C), result(D, "abc123XYW"))
ADDITIONS: dict[str, tuple[Message, Conversation, tuple[str, ...]]] = {
    "tool": (said("", call(B)), (result(C),), (C,)),
    "tools": (said("", *PARALLEL), RESULTS, (C, D)),
    "user": (said(B), (asked(C),), (C,)),
    "system": (said(B), (system(C), asked(D)), (C, D)),
    "tool, user": (said("", call(B)), (result(C), asked(D)), (C, D)),
    "assistant, user": (said(B), (said(C), asked(D)), (C, D)),
}
"""What clients add to a turn: the turn, what comes after it, and the words of that."""


class Probe:
    """Shows conversations to a template and settles its shape, one property after the other."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.shape = Shape()

    def settle(self) -> Shape:
        """The most generous shape under which every word is shown in its place."""
        if not self._shown((asked(A),), (A,)):
            self.shape = replace(self.shape, parts=True)
        self._unless("system_first", ((system(A), asked(B)), (A, B)))
        self._unless("users_in_row", ((asked(A), asked(B)), (A, B)))
        self._unless("assistants_in_row", ((asked(A), said(B), said(C), asked(D)), (A, B, C, D)))
        self._unless("assistant_first", ((said(A), asked(B)), (A, B)))
        self._settle_calls()
        if self.shape.calls:
            self._unless("any_call_id", *self._answered(call(B, _LONG_ID)))
            self._unless("parallel_calls", ((asked(A), said("", *PARALLEL)), (A, B, C)))
            if not self._shown((asked(A), said("", *PARALLEL)), (A, B, C)):
                self.shape = replace(self.shape, calls=False)
            self._unless("calls_with_text", ((asked(A), said(B, call(C))), (A, C)))
            self._unless("calls_with_text_and_reasoning", ((asked(A), said(B, call(C), reasoning=D)), (A, C)))
        one, two = (asked(A), said("", call(B))), (asked(A), said("", *PARALLEL))
        self._unless("tools", ((*one, result(C)), (A, C)), ((*two, *RESULTS), (A, D)))
        self._unless("user_after_tool", ((*one, result(C), asked(D)), (A, C, D)))
        self._unless(
            "system_anywhere",
            ((asked(A), said(B), asked(C), system(D)), (A, B, C, D)),
            ((asked(A), said(B), system(C), asked(D)), (A, B, C, D)),
            ((*one, result(C), system(D)), (A, C, D)),
        )
        return self.shape

    def _unless(self, field: str, *trials: tuple[Conversation, tuple[str, ...]]) -> None:
        """Switch a property off if one of the trials shows that the template does not have it."""
        if not all(self._shown(*trial) for trial in trials):
            self.shape = replace(self.shape, **{field: False})

    def _settle_calls(self) -> None:
        """Arguments as a mapping or as text, no content as an empty one or as None: what shows a call as it is."""
        for empty_is_none in (False, True):
            for mapped in (True, False):
                self.shape = replace(self.shape, mapped_arguments=mapped, empty_is_none=empty_is_none)
                if any(self._shown(*trial, unlike=("'place'", '\\"place')) for trial in self._answered(call(B))):
                    return
        self.shape = replace(self.shape, calls=False, mapped_arguments=True, empty_is_none=False)

    def _answered(self, made: ToolCall) -> Iterator[tuple[Conversation, tuple[str, ...]]]:
        alone = (asked(A), said("", made))
        if self.shape.tools and self._shown((*alone, result(C, made.id)), (A, B, C)):
            yield (*alone, result(C, made.id)), (A, B, C)
        else:
            yield alone, (A, B)

    def _shown(self, messages: Conversation, words: Sequence[str], unlike: tuple[str, ...] = ()) -> bool:
        try:
            text = self._renderer.text(self.shape.of(messages))
        except TemplateRefused:
            return False
        return in_order(text, words) and not any(odd in text for odd in unlike)


class Way(Enum):
    """How the end of an assistant's turn is marked."""

    CLOSED = "a token closes it"
    OPENED = "the first token of the next message ends it"
    BARE = "by no token of the template"


@dataclass(frozen=True)
class Ending:
    """The tokens at the end of a turn: `cuts` are those after which its continuation begins, `stops` can be sampled.

    One of `openings` begins what follows, and no other token takes its place; any of the other cuts closes any turn.
    One of `call_ends` closes a call, and is a cut where the template writes no other one after it.
    """

    way: Way
    cuts: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    call_ends: tuple[str, ...] = ()


def find_ending(renderer: Renderer, shape: Shape, special: SpecialText, eos: str | None) -> Ending:
    """How turns of this template end; raises `TemplateRefused` where it does not show what an assistant said."""
    seen = _Seen(renderer, shape, special)
    alone, answered = seen.after((said(B),), ask=False), seen.after((said(B), asked(C)))
    if alone and seen.first_closing(alone, answered, eos) != seen.opening_a_question():
        return seen.closed(alone, answered, eos)
    if answered:
        seen.has_next = bool(alone)
        ends = seen.openings((said(B), asked(C)), (said("", call(B)), result(C)))
        others = seen.openings((said("", call(B)), asked(C)), (said(B), system(C)), (said(B), said(C)), (said(B),))
        cuts = _distinct([*ends, *others])
        return Ending(Way.OPENED, cuts, _distinct(ends), openings=cuts)
    return Ending(Way.BARE)


class _Seen:
    """The control tokens that a template writes around the words of a conversation."""

    def __init__(self, renderer: Renderer, shape: Shape, special: SpecialText) -> None:
        self._renderer = renderer
        self._shape = shape
        self._special = special
        self.has_next = False
        """Whether a turn that nothing follows is followed by the token that opens a question all the same."""

    def closed(self, alone: list[str], answered: list[str], eos: str | None) -> Ending:
        """A token closes turns: perhaps another one in history, perhaps a third after a call."""
        first = self.first_closing(alone, answered, eos)
        known = [first, *([] if first in answered else answered[:1])]
        after_call = self._closing_a_call(known)
        more = [token for token in _MORE_ENDS if token in self._special.ids and token in self._renderer.source]
        between_calls = self._between((asked(A), said("", *PARALLEL)), B, C)
        between_results = self._between((asked(A), said("", *PARALLEL), *RESULTS), RESULTS[0].content, D)
        return Ending(
            Way.CLOSED,
            cuts=_distinct([*known, *after_call, *more]),
            stops=_distinct([first, *(token for token in after_call if token not in between_calls), *more]),
            openings=tuple(token for token in after_call if token in between_results),
            call_ends=tuple(token for token in after_call if token in between_calls),
        )

    def first_closing(self, alone: list[str], answered: list[str], eos: str | None) -> str:
        """Of the tokens after a turn that nothing follows, the one that ends it."""
        both = [one for one, other in zip(alone, answered, strict=False) if one == other]
        return eos if eos is not None and eos in both else alone[0]

    def opening_a_question(self) -> str | None:
        before = self._tokens(self._text((asked(A),)).partition(A)[0])
        return before[-1] if before else None

    def after(self, messages: Conversation, *, ask: bool = True) -> list[str]:
        """The tokens between the word B of an assistant's turn and the word C of what follows."""
        return self._tokens(self._after(messages, ask=ask))

    def openings(self, *conversations: Conversation) -> list[str]:
        """The first token of what follows the first message of each conversation."""
        found = []
        for turn, *following in conversations:
            try:
                alone, whole = self.after((turn,), ask=False), self.after((turn, *following))
            except TemplateRefused:
                continue
            inside = len(alone) - self.has_next
            found += whole[inside : inside + 1]
        return found

    def _closing_a_call(self, known: Sequence[str]) -> list[str]:
        """The token that closes a turn with a call, where it is another one: the last after the call."""
        try:
            tokens = self.after((said("", call(B)),), ask=False)
        except TemplateRefused:
            return []
        return [] if set(tokens) & set(known) else tokens[-1:]

    def _between(self, messages: Conversation, word: str, other: str) -> list[str]:
        if not self._shape.parallel_calls:
            return []
        try:
            text = self._text(messages)
        except TemplateRefused:
            return []
        return self._tokens(text.rpartition(other)[0].rpartition(word)[2])

    def _after(self, messages: Conversation, *, ask: bool) -> str:
        _, found, rest = self._text((asked(A), *messages), ask=ask).rpartition(B)
        if not found:
            raise TemplateRefused("the model's chat template does not show what an assistant said")
        return rest.partition(C)[0]

    def _text(self, messages: Conversation, *, ask: bool = True) -> str:
        return self._renderer.text(self._shape.of(messages), ask=ask)

    def _tokens(self, text: str) -> list[str]:
        return self._special.pattern.findall(text)


def _distinct(tokens: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tokens))
