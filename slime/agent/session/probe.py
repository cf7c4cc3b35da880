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
    """The tokens at the end of a turn: `cuts` are those after which its continuation begins, `stops` can be sampled."""

    way: Way
    cuts: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()


def find_ending(renderer: Renderer, shape: Shape, special: SpecialText) -> Ending:
    """How turns of this template end; raises `TemplateRefused` where it does not show what an assistant said."""
    seen = _Seen(renderer, shape, special)
    alone, answered = seen.after((said(B),), ask=False), seen.after((said(B), asked(C)))
    if closing := special.pattern.search(alone):
        in_history = [match[0] for match in [special.pattern.search(answered)] if match]
        stops = [closing[0], *seen.closing_a_call([closing[0], *in_history])]
        stops += [token for token in _MORE_ENDS if token in special.ids and token in renderer.source]
        return Ending(Way.CLOSED, tuple(dict.fromkeys([*stops, *in_history])), tuple(dict.fromkeys(stops)))
    if special.pattern.search(answered):
        turn_ends = seen.openings((said(B), asked(C)), (said("", call(B)), result(C)))
        others = seen.openings((said("", call(B)), asked(C)), (said(B), system(C)), (said(B), said(C)), (said(B),))
        return Ending(Way.OPENED, tuple(dict.fromkeys([*turn_ends, *others])), tuple(dict.fromkeys(turn_ends)))
    return Ending(Way.BARE)


class _Seen:
    """What a template writes after the word `B` of an assistant's turn."""

    def __init__(self, renderer: Renderer, shape: Shape, special: SpecialText) -> None:
        self._renderer = renderer
        self._shape = shape
        self._special = special

    def after(self, messages: Conversation, *, ask: bool = True) -> str:
        text = self._renderer.text(self._shape.of((asked(A), *messages)), ask=ask)
        _, found, rest = text.rpartition(B)
        if not found:
            raise TemplateRefused("the model's chat template does not show what an assistant said")
        return rest.partition(C)[0]

    def closing_a_call(self, known: Sequence[str]) -> list[str]:
        """The token that closes a turn with a call, where it is another one: the last after the call."""
        try:
            tokens = self._special.pattern.findall(self.after((said("", call(B)),), ask=False))
        except TemplateRefused:
            return []
        return [] if not tokens or set(tokens) & set(known) else tokens[-1:]

    def openings(self, *conversations: Conversation) -> list[str]:
        """The first token of what follows the first message of each conversation."""
        found = []
        for turn, *following in conversations:
            try:
                alone, whole = self.after((turn,), ask=False), self.after((turn, *following))
            except TemplateRefused:
                continue
            if match := self._special.pattern.search(whole, _shared_length(alone, whole)):
                found.append(match[0])
        return found


def _shared_length(left: str, right: str) -> int:
    return next((i for i, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), len(left))
