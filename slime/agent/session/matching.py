"""Matches a request with the turns that a session holds: the turn it continues, and the messages that are new.

    extended   the request continues the end of a branch
    forked     its history was edited, compacted or branched: it continues the deepest turn that it still contains
    refused    decided by the session: the template cannot be continued, or forks are not allowed

A history contains a turn if it contains everything before the turn, message by message, and an echo of the turn itself.
An echo is recognised by its reference, else by its tool-call ids (any one of them, even if names and arguments were
changed), else by its content. A client may send one turn back as several assistant messages. If two turns cannot be
told apart, the matcher does not guess: the message is rendered as text.

Invariants: each turn of the tree is visited at most once, and a message that is equal without normalisation costs one
comparison of its text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from slime.agent.messages import Message, TurnRequest
from slime.agent.session.tree import Context, Tree, Turn
from slime.storage.json_types import JsonMapping

_LEAST_PARTS = 2
"""Messages in which any turn may be echoed: its text and its calls. A turn with several calls may have more."""


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
