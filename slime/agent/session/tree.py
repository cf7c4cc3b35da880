"""The turns of a session as a tree of arrays, and the comparison of messages with those of a client.

Contexts and turns alternate: a context holds tokens that were not sampled (a prompt, tool results, the template's
tokens around them), a turn the tokens that were sampled after it. The ids of a turn's history are the arrays on the
path from its root, concatenated.

Invariants: an array is never modified once it is in the tree. `delivered` of a turn is a copy of the sampler's output
that no other code reads; the tokens of prompts and samples are checked against it. A message is recognised even if the
client writes it differently: other white space around it or inside an assistant's text, arguments serialised in another
way, calls in another order, reasoning left out. Other differences count: an edited text is another message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from slime.agent.messages import Message, ToolCall
from slime.agent.session.limits import LimitKind
from slime.storage.json_types import JsonMapping, JsonObject


class Held:
    """A message of the history, with its normalised text and calls cached for comparisons."""

    def __init__(self, message: Message) -> None:
        self.message = message

    def is_same_message(self, given: Message) -> bool:
        """Return whether `given` is this message; equal messages are compared without normalisation."""
        mine = self.message
        if mine.role != given.role or mine.tool_call_id != given.tool_call_id:
            return False
        if mine.role == "assistant":
            return self.matches_content(given)
        return mine.content == given.content or self._text == tidy(given.content)

    def matches_content(self, echo: Message) -> bool:
        """Return whether an assistant message has the same text and calls, and the same reasoning if `echo` has any."""
        mine = self.message
        if not self.says(echo.content):
            return False
        if echo.reasoning and mine.reasoning != echo.reasoning and self._thoughts != collapse_spaces(echo.reasoning):
            return False
        return mine.tool_calls == echo.tool_calls or self._calls == _comparable(echo.tool_calls)

    def says(self, text: str) -> bool:
        """Return whether `text` has the same words as this message."""
        return self.message.content == text or self._words == collapse_spaces(text)

    @cached_property
    def call_ids(self) -> frozenset[str]:
        return frozenset(call.id for call in self.message.tool_calls)

    @cached_property
    def _text(self) -> str:
        return tidy(self.message.content)

    @cached_property
    def _words(self) -> str:
        return collapse_spaces(self.message.content)

    @cached_property
    def _thoughts(self) -> str:
        return collapse_spaces(self.message.reasoning or "")

    @cached_property
    def _calls(self) -> list[tuple[str, str]]:
        return _comparable(self.message.tool_calls)


def tidy(text: str) -> str:
    """Strip white space at the ends of lines and around the text; indentation has a meaning and stays."""
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()


def collapse_spaces(text: str) -> str:
    """Replace each run of white space by one blank, and strip the text."""
    return " ".join(text.split())


def _comparable(calls: Iterable[ToolCall]) -> list[tuple[str, str]]:
    """Return calls by name and value of their arguments, sorted."""
    comparable = []
    for call in calls:
        try:
            arguments = json.dumps(json.loads(call.arguments or "{}"), sort_keys=True)
        except (ValueError, RecursionError):
            arguments = collapse_spaces(call.arguments)
        comparable.append((call.name, arguments))
    return sorted(comparable)


@dataclass(eq=False)
class Context:
    """Messages that a client added after `parent`, with their rendered tokens; only a root has `tools`."""

    number: int
    parent: Turn | None
    messages: tuple[Held, ...]
    ids: np.ndarray
    tools: tuple[JsonMapping, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    in_flight: int = 0


@dataclass(eq=False)
class Turn:
    """One sampled answer of the model. `id` is the reference that a client may echo."""

    id: str
    number: int
    context: Context
    held: Held
    ids: np.ndarray
    log_probs: np.ndarray
    delivered: bytes
    finish_reason: str
    meta_info: JsonObject
    text: str | None = None
    ill_formed: bool = False
    reward: float | None = None
    limited: LimitKind | None = None
    """The limit that kept this turn from being continued."""
    contexts: list[Context] = field(default_factory=list)

    @property
    def message(self) -> Message:
        return self.held.message

    @property
    def parent(self) -> Turn | None:
        return self.context.parent

    @property
    def is_leaf(self) -> bool:
        """True if no turn was sampled after it."""
        return not any(context.turns for context in self.contexts)

    @property
    def is_free(self) -> bool:
        """True if no turn was sampled after it, and none is being sampled."""
        return not self.contexts


class Tree:
    """All turns of a session; it has several roots if the client started new conversations."""

    def __init__(self) -> None:
        self.roots: list[Context] = []
        self.turns: dict[str, Turn] = {}
        self._contexts = 0

    def contexts_after(self, turn: Turn | None) -> list[Context]:
        """Return the contexts after `turn`, or the roots."""
        return self.roots if turn is None else turn.contexts

    def begin(self, context: Context) -> None:
        """Note that a turn is being sampled after this context, and add the context to the tree."""
        siblings = self.contexts_after(context.parent)
        if context not in siblings:
            siblings.append(context)
        context.in_flight += 1

    def end(self, context: Context) -> None:
        """Note that sampling has ended; a context without turns and without sampling in flight is removed."""
        context.in_flight -= 1
        if not context.in_flight and not context.turns:
            self.contexts_after(context.parent).remove(context)

    def add(self, turn: Turn) -> bool:
        """Add a turn under its context; returns True if that is a fork, which adds a leaf to a non-empty tree."""
        parent = turn.parent
        was_open = parent.is_leaf if parent is not None else not self.turns
        turn.context.turns.append(turn)
        self.turns[turn.id] = turn
        return not was_open

    def restore(self, context: Context) -> None:
        """Add a context of a restored tree, with no sampling in flight."""
        self.contexts_after(context.parent).append(context)
        self._contexts = max(self._contexts, context.number)

    def next_context_number(self) -> int:
        self._contexts += 1
        return self._contexts

    def leaves(self) -> list[Turn]:
        """Return the last turn of every branch, in the order in which they were sampled."""
        return [turn for turn in self.turns.values() if turn.is_leaf]


def path(turn: Turn | None) -> list[Turn]:
    """Return the turns from the root down to `turn`."""
    found: list[Turn] = []
    while turn is not None:
        found.append(turn)
        turn = turn.parent
    found.reverse()
    return found


def concatenate_ids(turns: list[Turn], context: Context | None = None) -> np.ndarray:
    """Concatenate the ids of a path, and of a context after it, into one read-only array."""
    pieces = [piece for turn in turns for piece in (turn.context.ids, turn.ids)]
    if context is not None:
        pieces.append(context.ids)
    ids = np.concatenate(pieces)
    ids.flags.writeable = False
    return ids


def token_ranges(turns: list[Turn]) -> Iterator[tuple[Turn, int, int]]:
    """Yield each turn of a path with the range of its tokens, counted from the first token of the path."""
    position = 0
    for turn in turns:
        start = position + len(turn.context.ids)
        position = start + len(turn.delivered) // 4
        yield turn, start, position


def count_retokenised(ids: np.ndarray, turns: list[Turn]) -> int:
    """Count the sampled tokens of a path that differ in `ids` from the tokens that the sampler delivered."""
    count = 0
    ids = ids.astype(np.int32, copy=False)
    for turn, start, stop in token_ranges(turns):
        own = ids[start:stop]
        if own.tobytes() != turn.delivered:
            delivered = np.frombuffer(turn.delivered, dtype=np.int32)
            count += int((own != delivered[: len(own)]).sum()) + len(delivered) - len(own)
    return count
