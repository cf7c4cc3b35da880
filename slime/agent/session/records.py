"""Turns as plain values and back: for the journal of turns, and for the way from one process to another.

Invariants: a tree read back gives the same prompts and the same samples. A record holds what its turn added and
nothing of its history, so the records of a session are as long as the session. What does not fit together is a
`BadRecord`, never half a tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np

from slime.agent.messages import Message, Role, ToolCall
from slime.agent.session.echo import Held
from slime.agent.session.limits import LimitKind
from slime.agent.session.tree import Context, Tree, Turn

_ROLES, _KINDS = get_args(Role), get_args(LimitKind)


class BadRecord(Exception):
    """Records that no session wrote."""


def turn_record(turn: Turn) -> dict[str, Any]:
    """A turn, with its context if it is the first after it."""
    return {
        "id": turn.id,
        "number": turn.number,
        "context": _context_record(turn.context) if turn.context.turns[0] is turn else turn.context.number,
        "message": message_record(turn.message),
        "ids": turn.ids,
        "log_probs": turn.log_probs,
        "delivered": turn.delivered,
        "finish_reason": turn.finish_reason,
        "meta_info": turn.meta_info,
        "text": turn.text,
        "ill_formed": turn.ill_formed,
        "reward": turn.reward,
        "limited": turn.limited,
    }


def tree_of(records: Iterable[Mapping[str, Any]]) -> Tree:
    """The tree of these turns, in whatever order they come."""
    tree = Tree()
    contexts: dict[int, Context] = {}
    try:
        for record in sorted(records, key=lambda record: record["number"]):
            _add(tree, contexts, record)
    except BadRecord:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRecord(f"a turn cannot be read: {type(error).__name__}: {error}") from error
    return tree


def message_record(message: Message) -> dict[str, Any]:
    """A message as plain values."""
    plain = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return {**plain, "tool_calls": [[call.id, call.name, call.arguments] for call in message.tool_calls]}


def message_of(record: Mapping[str, Any]) -> Message:
    """The inverse of `message_record`."""
    calls = tuple(ToolCall(*map(_text, call)) for call in record["tool_calls"])
    if record["role"] not in _ROLES:
        raise BadRecord(f"no message has the role {record['role']!r}")
    return Message(
        role=record["role"],
        content=_text(record["content"]),
        tool_calls=calls,
        **{name: _text_or_none(record[name]) for name in ("reasoning", "tool_call_id", "name", "reference")},
    )


def _context_record(context: Context) -> dict[str, Any]:
    return {
        "number": context.number,
        "parent": None if context.parent is None else context.parent.id,
        "messages": [message_record(held.message) for held in context.messages],
        "ids": context.ids,
        "tools": [dict(tool) for tool in context.tools],
    }


def _add(tree: Tree, contexts: dict[int, Context], record: Mapping[str, Any]) -> None:
    """Put a recorded turn into the tree."""
    if record["number"] != len(tree.turns):
        raise BadRecord(f"turn {len(tree.turns)} is missing")
    context = record["context"]
    if not isinstance(context, int):
        context = _add_context(tree, contexts, context)
    ids, log_probs = _array(record["ids"], np.int32), _array(record["log_probs"], np.float32)
    delivered = bytes(record["delivered"])
    if len(ids) != len(log_probs) or len(delivered) != ids.nbytes:
        raise BadRecord(f"turn {record['number']} has {len(ids)} ids and {len(log_probs)} log-probs")
    if record["limited"] not in (None, *_KINDS):
        raise BadRecord(f"turn {record['number']} was ended by an unknown limit, {record['limited']!r}")
    turn = Turn(
        id=_text(record["id"]),
        number=record["number"],
        context=contexts[context],
        held=Held(message_of(record["message"])),
        ids=ids,
        log_probs=log_probs,
        delivered=delivered,
        finish_reason=_text(record["finish_reason"]),
        meta_info=dict(record["meta_info"]),
        text=_text_or_none(record["text"]),
        ill_formed=bool(record["ill_formed"]),
        reward=None if record["reward"] is None else float(record["reward"]),
        limited=record["limited"],
    )
    if turn.id in tree.turns:
        raise BadRecord(f"two turns are called {turn.id}")
    tree.add(turn)


def _add_context(tree: Tree, contexts: dict[int, Context], record: Mapping[str, Any]) -> int:
    number = int(record["number"])
    if number in contexts:
        raise BadRecord(f"context {number} is there twice")
    contexts[number] = Context(
        number=number,
        parent=None if record["parent"] is None else tree.turns[record["parent"]],
        messages=tuple(Held(message_of(message)) for message in record["messages"]),
        ids=_array(record["ids"], np.int32),
        tools=tuple(record["tools"]),
    )
    tree.restore(contexts[number])
    return number


def _array(values: Any, dtype: type) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.can_cast(array.dtype, dtype, "same_kind")):
        raise BadRecord(f"{array.dtype}{array.shape} is no column of {np.dtype(dtype)}")
    array = array.astype(dtype)
    array.flags.writeable = False
    return array


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{value!r:.80} is no text")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)
