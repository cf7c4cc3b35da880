"""The turns of a session as a tree of arrays.

Contexts and turns alternate: a context holds the tokens that nobody sampled (a prompt, tool results, the marks of the
template around them), a turn those that were sampled after it. The ids of a turn's history are the pieces on the way
from its root, joined.

Invariants: a piece is never written to once it is in the tree; `delivered` of a turn is what the sampler handed over, a
copy that no other code reads, by which the tokens of prompts and samples are checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from slime.agent.messages import Message, ToolCall
from slime.agent.session.limits import LimitKind

# Whether a message that a client sends is one that is held.
#
# Invariant: a message is known again however its client writes it down: with other white space around it or inside an
# assistant's words, with arguments serialised anew, calls in another order, reasoning left out. What was said
# otherwise counts: an edited text is another message.


class Held:
    """A message of the history, with what it is compared by computed once."""

    def __init__(self, message: Message) -> None:
        self.message = message

    def is_said_by(self, given: Message) -> bool:
        """Whether `given` is this message; where both are equal as they stand, nothing is normalised."""
        mine = self.message
        if mine.role != given.role or mine.tool_call_id != given.tool_call_id:
            return False
        if mine.role == "assistant":
            return self.says_the_same(given)
        return mine.content == given.content or self._text == tidy(given.content)

    def says_the_same(self, echo: Message) -> bool:
        """Of an assistant's message: the same text and calls, and the same reasoning where the echo has any."""
        mine = self.message
        if not self.says(echo.content):
            return False
        if echo.reasoning and mine.reasoning != echo.reasoning and self._thoughts != words(echo.reasoning):
            return False
        return mine.tool_calls == echo.tool_calls or self._calls == _comparable(echo.tool_calls)

    def says(self, text: str) -> bool:
        """Whether these are the words of this message."""
        return self.message.content == text or self._words == words(text)

    @cached_property
    def call_ids(self) -> frozenset[str]:
        return frozenset(call.id for call in self.message.tool_calls)

    @cached_property
    def _text(self) -> str:
        return tidy(self.message.content)

    @cached_property
    def _words(self) -> str:
        return words(self.message.content)

    @cached_property
    def _thoughts(self) -> str:
        return words(self.message.reasoning or "")

    @cached_property
    def _calls(self) -> list[tuple[str, str]]:
        return _comparable(self.message.tool_calls)


def tidy(text: str) -> str:
    """A text without the white space that ends its lines and surrounds it: indentation has a meaning."""
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()


def words(text: str) -> str:
    """A text as words with single blanks between them."""
    return " ".join(text.split())


def _comparable(calls: Iterable[ToolCall]) -> list[tuple[str, str]]:
    """Calls by name and by the value of their arguments, in an order of their own."""
    return sorted((call.name, _value(call.arguments)) for call in calls)


def _value(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return words(arguments)


@dataclass(eq=False)
class Context:
    """What a client added after `parent`, with the tokens it was rendered as; `tools` where a history begins."""

    number: int
    parent: Turn | None
    messages: tuple[Held, ...]
    ids: np.ndarray
    tools: tuple[Mapping[str, Any], ...] = ()
    turns: list[Turn] = field(default_factory=list)
    in_flight: int = 0


@dataclass(eq=False)
class Turn:
    """One answer of the model. `id` is the reference that a client may echo."""

    id: str
    number: int
    context: Context
    held: Held
    ids: np.ndarray
    log_probs: np.ndarray
    delivered: bytes
    finish_reason: str
    meta_info: dict[str, Any]
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
        """Whether nothing was sampled after it."""
        return not any(context.turns for context in self.contexts)

    @property
    def is_free(self) -> bool:
        """Whether nothing was sampled after it, nor is being sampled."""
        return not self.contexts


class Tree:
    """All turns of a session; several roots where a client began anew."""

    def __init__(self) -> None:
        self.roots: list[Context] = []
        self.turns: dict[str, Turn] = {}
        self._contexts = 0

    def contexts_after(self, turn: Turn | None) -> list[Context]:
        """What was asked after `turn`, or at the beginning."""
        return self.roots if turn is None else turn.contexts

    def begin(self, context: Context) -> None:
        """A turn is being sampled after this context, which is in the tree from now on."""
        siblings = self.contexts_after(context.parent)
        if context not in siblings:
            siblings.append(context)
        context.in_flight += 1

    def end(self, context: Context) -> None:
        """A turn that was being sampled is not any more; a context that nothing came of is gone."""
        context.in_flight -= 1
        if not context.in_flight and not context.turns:
            self.contexts_after(context.parent).remove(context)

    def add(self, turn: Turn) -> bool:
        """Put a turn under its context; True if that makes a leaf more than there was, once there was one."""
        parent = turn.parent
        was_open = parent.is_leaf if parent is not None else not self.turns
        turn.context.turns.append(turn)
        self.turns[turn.id] = turn
        return not was_open

    def restore(self, context: Context) -> None:
        """Put back a context that was in the tree, with nothing in flight."""
        self.contexts_after(context.parent).append(context)
        self._contexts = max(self._contexts, context.number)

    def next_context_number(self) -> int:
        self._contexts += 1
        return self._contexts

    def leaves(self) -> list[Turn]:
        """The last turn of every branch, in the order in which they were sampled."""
        return [turn for turn in self.turns.values() if turn.is_leaf]


def path(turn: Turn | None) -> list[Turn]:
    """The turns from the root down to `turn`."""
    found: list[Turn] = []
    while turn is not None:
        found.append(turn)
        turn = turn.parent
    found.reverse()
    return found


def joined(turns: list[Turn], context: Context | None = None) -> np.ndarray:
    """The ids of a path, and of a context after it: one copy, not to be written to."""
    pieces = [piece for turn in turns for piece in (turn.context.ids, turn.ids)]
    if context is not None:
        pieces.append(context.ids)
    ids = np.concatenate(pieces)
    ids.flags.writeable = False
    return ids


def placed(turns: list[Turn]) -> Iterator[tuple[Turn, int, int]]:
    """Each turn of a path with the positions, from the first token of the path on, at which it was sampled."""
    position = 0
    for turn in turns:
        start = position + len(turn.context.ids)
        position = start + len(turn.delivered) // 4
        yield turn, start, position


def retokenised(ids: np.ndarray, turns: list[Turn]) -> int:
    """How many sampled tokens of a path `ids` have otherwise than the sampler delivered them."""
    count = 0
    ids = ids.astype(np.int32, copy=False)
    for turn, start, stop in placed(turns):
        own = ids[start:stop]
        if own.tobytes() != turn.delivered:
            delivered = np.frombuffer(turn.delivered, dtype=np.int32)
            count += int((own != delivered[: len(own)]).sum()) + len(delivered) - len(own)
    return count
