"""The turns of a session as a tree of arrays, and the place of a client's request in it.

Contexts and turns alternate: a context holds tokens that were not sampled (a prompt, tool results, the template's
tokens around them), a turn the tokens that were sampled after it. The ids of a turn's history are the arrays on the
path from its root, concatenated. `decide` finds the turn that a request continues, and the messages that are new:

    extended   the request continues the end of a branch
    forked     its history was edited, compacted or branched: it continues the deepest turn that it still contains
    refused    decided by the session: the template cannot be continued, or forks are not allowed

A history contains a turn if it contains everything before the turn, message by message, and an echo of the turn itself.
An echo is recognised by its reference, else by its tool-call ids (any one of them, even if names and arguments were
changed), else by its content. A client may send one turn back as several assistant messages. If two turns cannot be
told apart, none is chosen: the message is rendered as text.

Invariants: an array is never modified once it is in the tree. `delivered` of a turn is a copy of the sampler's output
that no other code reads; the tokens of prompts and samples are checked against it. A message is recognised even if the
client writes it differently: other white space around it or inside an assistant's text, arguments serialised in another
way, calls in another order, reasoning left out. Other differences count: an edited text is another message. Each turn
of the tree is visited at most once, and a message that is equal without normalisation costs one comparison of its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.session.limits import LimitKind
from slime.storage.json_types import JsonMapping, JsonObject

_LEAST_PARTS = 2
"""Messages in which any turn may be echoed: its text and its calls. A turn with several calls may have more."""


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


class MatchOutcome(Enum):
    """Relation of a request to the turns of the session."""

    EXTENDED = "extended"
    FORKED = "forked"


@dataclass(frozen=True)
class Decision:
    """The place of a request: after `turn` (None: at a root), with the messages `new`.

    `context` is the context of these messages if the tree has it already.
    """

    outcome: MatchOutcome
    turn: Turn | None
    new: tuple[Message, ...]
    context: Context | None


def decide(tree: Tree, request: TurnRequest) -> Decision:
    """Find the place of a request in a tree.

    That is the turn that covers most of the request's messages; of several the latest.
    """
    messages = request.messages
    best: tuple[int, int, Turn | None] = (0, -1, None)
    waiting = [(root, 0) for root in tree.roots if same_tools(root.tools, request.tools)]
    while waiting:
        context, at = waiting.pop()
        end = _end_of(context, messages, at)
        if end is None:
            continue
        for echoed, after in _echoed(context.turns, messages, end):
            if (after, echoed.number) > best[:2]:
                best = (after, echoed.number, echoed)
            waiting += [(child, after) for child in echoed.contexts]
    at, _, turn = best
    candidates = tree.contexts_after(turn)
    if turn is None:
        candidates = [root for root in candidates if same_tools(root.tools, request.tools)]
    known = next((context for context in candidates if _end_of(context, messages, at) == len(messages)), None)
    is_free = turn.is_free if turn is not None else not tree.roots
    return Decision(MatchOutcome.EXTENDED if is_free else MatchOutcome.FORKED, turn, messages[at:], known)


def _end_of(context: Context, messages: Sequence[Message], at: int) -> int | None:
    """Return the index after the context's messages if they start at index `at`, else None."""
    end = at + len(context.messages)
    if end > len(messages):
        return None
    is_there = all(held.is_same_message(given) for held, given in zip(context.messages, messages[at:end], strict=True))
    return end if is_there else None


def _echoed(turns: Sequence[Turn], messages: Sequence[Message], at: int) -> list[tuple[Turn, int]]:
    """Return the turns whose echo starts at index `at`, each with the index after its echo."""
    most = max((len(turn.message.tool_calls) for turn in turns), default=0) + _LEAST_PARTS
    found: dict[str, tuple[Turn, int]] = {}
    for end in range(at + 1, min(at + most, len(messages)) + 1):
        if messages[end - 1].role != "assistant":
            break
        parts = messages[at:end]
        echo = parts[0]
        if len(parts) > 1:
            echo = Message(
                role="assistant",
                content="\n".join(part.content for part in parts if part.content),
                reasoning="\n".join(part.reasoning for part in parts if part.reasoning) or None,
                tool_calls=tuple(call for part in parts for call in part.tool_calls),
                reference=next((part.reference for part in parts if part.reference is not None), None),
            )
        for turn in match_echo(turns, echo):
            if turn.id not in found:
                found[turn.id] = (turn, _extend_echo(turn, messages, at, end))
    return list(found.values())


def match_echo(turns: Sequence[Turn], echo: Message) -> list[Turn]:
    """Return the turns that `echo` may be an echo of, by the strongest evidence available."""
    if echo.reference is not None:
        by_reference = [turn for turn in turns if turn.id == echo.reference]
        if by_reference:
            return by_reference
    ids = {call.id for call in echo.tool_calls}
    by_calls = [turn for turn in turns if not ids.isdisjoint(turn.held.call_ids)]
    if len(by_calls) == 1:
        return by_calls
    return [turn for turn in by_calls or turns if turn.held.matches_content(echo)]


def _extend_echo(turn: Turn, messages: Sequence[Message], at: int, end: int) -> int:
    """Extend the echo `messages[at:end]` by later parts of the same turn and return its end.

    A client may send the text of a turn after its calls.
    """
    has_text = any(message.content.strip() for message in messages[at:end])
    seen = {call.id for message in messages[at:end] for call in message.tool_calls}
    while end < len(messages) and (part := messages[end]).role == "assistant":
        calls = {call.id for call in part.tool_calls}
        is_text = bool(part.content.strip())
        is_own = calls <= turn.held.call_ids and (not is_text or turn.held.says(part.content))
        is_news = (calls and calls.isdisjoint(seen)) or (is_text and not has_text)
        if not is_own or not is_news or part.reference not in (None, turn.id):
            break
        seen |= calls
        has_text = has_text or is_text
        end += 1
    return end


def same_tools(held: Sequence[JsonMapping], given: Sequence[JsonMapping]) -> bool:
    """Return whether these are the same tools, in any order."""
    if len(held) != len(given):
        return False
    return held == given or sorted(map(_canonical, held)) == sorted(map(_canonical, given))


def _canonical(tool: JsonMapping) -> str:
    return json.dumps(tool, sort_keys=True, default=str)
