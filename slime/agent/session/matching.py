"""The one rule that decides where a request belongs: which held turn it goes on from, and what is new in it.

    extended   the request goes on from the end of what is held
    forked     its history was edited, compacted or branched: it goes on from the deepest turn that is still in it
    refused    said by the session: the template cannot be continued, or forks are not allowed

A turn is in a history if all that led to it is, message by message, and its own echo is recognised: by its reference,
by the ids of its tool calls (any one of them, whatever became of names and arguments), then by what it says. A client
may send one turn back as several assistant messages. What cannot be told apart is not guessed: it is rendered as text.

Invariant: every turn of the tree is looked at once at most, and a message that is equal as it stands costs one
comparison of its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from slime.agent.messages import Message, TurnRequest
from slime.agent.session.tree import Context, Tree, Turn

_LEAST_PARTS = 2
"""The parts that any turn may come back in: its words and its calls; more if it has several calls."""


class Outcome(Enum):
    """What a request is to the turns that are held."""

    EXTENDED = "extended"
    FORKED = "forked"


@dataclass(frozen=True)
class Decision:
    """Go on from `turn` (None: from nothing) with the messages `new`; `context` is theirs if it is held already."""

    outcome: Outcome
    turn: Turn | None
    new: tuple[Message, ...]
    context: Context | None


def decide(tree: Tree, request: TurnRequest) -> Decision:
    """Where a request belongs in a tree."""
    messages = request.messages
    turn, at = _deepest(tree, request)
    new = messages[at:]
    candidates = tree.contexts_after(turn)
    if turn is None:
        candidates = [root for root in candidates if same_tools(root.tools, request.tools)]
    context = next((context for context in candidates if _end_of(context, messages, at) == len(messages)), None)
    is_free = turn.is_free if turn is not None else not tree.roots
    return Decision(Outcome.EXTENDED if is_free else Outcome.FORKED, turn, new, context)


def _deepest(tree: Tree, request: TurnRequest) -> tuple[Turn | None, int]:
    """The turn up to which the request has most of its messages, of equals the latest; and how many these are."""
    messages = request.messages
    best: tuple[int, int, Turn | None] = (0, -1, None)
    waiting = [(root, 0) for root in tree.roots if same_tools(root.tools, request.tools)]
    while waiting:
        context, at = waiting.pop()
        end = _end_of(context, messages, at)
        if end is None:
            continue
        for turn, after in _echoed(context.turns, messages, end):
            if (after, turn.number) > best[:2]:
                best = (after, turn.number, turn)
            waiting += [(child, after) for child in turn.contexts]
    return best[2], best[0]


def _end_of(context: Context, messages: Sequence[Message], at: int) -> int | None:
    """Where the messages of a context end that stand at `at`; None if they do not stand there."""
    end = at + len(context.messages)
    if end > len(messages):
        return None
    is_there = all(held.is_said_by(given) for held, given in zip(context.messages, messages[at:end], strict=True))
    return end if is_there else None


def _echoed(turns: Sequence[Turn], messages: Sequence[Message], at: int) -> list[tuple[Turn, int]]:
    """The turns whose echo stands at `at`, each with where it ends."""
    most = max((len(turn.message.tool_calls) for turn in turns), default=0) + _LEAST_PARTS
    found: dict[str, tuple[Turn, int]] = {}
    for end in range(at + 1, min(at + most, len(messages)) + 1):
        if messages[end - 1].role != "assistant":
            break
        for turn in recognised(turns, _merged(messages[at:end])):
            if turn.id not in found:
                found[turn.id] = (turn, _with_other_parts(turn, messages, at, end))
    return list(found.values())


def recognised(turns: Sequence[Turn], echo: Message) -> list[Turn]:
    """Those of some turns that `echo` can be, by the best evidence that there is."""
    if echo.reference is not None:
        by_reference = [turn for turn in turns if turn.id == echo.reference]
        if by_reference:
            return by_reference
    ids = {call.id for call in echo.tool_calls}
    by_calls = [turn for turn in turns if not ids.isdisjoint(turn.held.call_ids)]
    if len(by_calls) == 1:
        return by_calls
    return [turn for turn in by_calls or turns if turn.held.says_the_same(echo)]


def _merged(parts: Sequence[Message]) -> Message:
    """Consecutive assistant messages as one."""
    if len(parts) == 1:
        return parts[0]
    return Message(
        role="assistant",
        content="\n".join(part.content for part in parts if part.content),
        reasoning="\n".join(part.reasoning for part in parts if part.reasoning) or None,
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
        reference=next((part.reference for part in parts if part.reference is not None), None),
    )


def _with_other_parts(turn: Turn, messages: Sequence[Message], at: int, end: int) -> int:
    """Where the echo of a turn ends that is known by the messages up to `end`: its words may follow its calls."""
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


def same_tools(held: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these are the same tools, in whatever order."""
    if len(held) != len(given):
        return False
    return held == given or sorted(map(_canonical, held)) == sorted(map(_canonical, given))


def _canonical(tool: Mapping[str, Any]) -> str:
    return json.dumps(tool, sort_keys=True, default=str)
