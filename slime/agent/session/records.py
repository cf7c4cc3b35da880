"""Turns as plain values and back: for the journal of turns, and for the way from one process to another.

Invariants: a tree read back gives the same prompts and the same samples. A record holds what its turn added and
nothing of its history, so the records of a session are as long as the session. What does not fit together is a
`BadRecord`, never half a tree.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from slime.agent.messages import Message, Role, ToolCall
from slime.agent.session.limits import LimitKind
from slime.agent.session.tree import Context, Held, Tree, Turn, path, placed, retokenised
from slime.data.sample import Reward, Sample

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


# The leaves of a session's tree as samples of one rollout.
#
# Invariants: a sampled token is trained on in one sample, the first that it is part of, and is context in the others;
# what nobody sampled is trained on in none. The prompt of a sample is the first prompt of its branch, the response is
# everything after it. All samples have the identity of the one that was dispatched, and its reward each: statistics
# count the rollout once.

_ROUTED = ("routed_experts", "routed_experts_start_len")
"""What later turns of a branch go on from, wherever this one is trained on."""


@dataclass(frozen=True)
class Finished:
    """The samples, and what was counted while they were made."""

    samples: list[Sample]
    trained_tokens: int
    retokenised_tokens: int


def session_samples(
    tree: Tree, base: Sample, reward: Reward | None, metadata: Mapping[str, Any] | None, args: Any = None
) -> Finished:
    """One sample a leaf, in the order in which they were sampled; none without a turn."""
    total = _sum_of_turns(tree) if reward is None else None
    reward = total if reward is None else reward
    samples, trained_tokens, differing = [], 0, 0
    seen: set[str] = set()
    for leaf in tree.leaves():
        turns = path(leaf)
        sample = _sample_of(base, turns, seen, args)
        sample.reward = copy.deepcopy(reward) if reward is not None else sample.reward
        if total is not None:
            sample.metadata["turn_rewards_sum"] = total
        sample.metadata |= copy.deepcopy(dict(metadata or {}))
        seen.update(turn.id for turn in turns)
        trained_tokens += sample.effective_response_length
        differing += retokenised(sample.token_array(), turns)
        samples.append(sample)
    return Finished(samples, trained_tokens, differing)


def _sum_of_turns(tree: Tree) -> float | None:
    given = [turn.reward for turn in tree.turns.values() if turn.reward is not None]
    return sum(given) if given else None


def _sample_of(base: Sample, turns: list[Turn], seen: set[str], args: Any) -> Sample:
    """The sample of one branch; turns that are in `seen` are trained on in another."""
    leaf = turns[-1]
    sample = _blank(base, turns[0].context)
    for turn in turns:
        if turn is not turns[0]:
            sample.append_response_tokens(tokens=turn.context.ids, trainable=False, text=_text_of(turn.context))
        if turn.id in seen:
            routed = {name: turn.meta_info[name] for name in _ROUTED if name in turn.meta_info}
            sample.append_response_tokens(args, tokens=turn.ids, trainable=False, meta_info=routed, text=_spoken(turn))
        else:
            sample.append_response_tokens(
                args, tokens=turn.ids, log_probs=turn.log_probs, meta_info=turn.meta_info, text=_spoken(turn)
            )
    is_truncated = leaf.limited is not None or leaf.finish_reason == "length"
    sample.status = Sample.Status.TRUNCATED if is_truncated else Sample.Status.COMPLETED
    sample.metadata |= {
        "truncated": is_truncated,
        "use_tool": any(turn.message.tool_calls for turn in turns),
        "ill_formed": any(turn.ill_formed for turn in turns),
    }
    if leaf.limited is not None:
        sample.metadata["session_limit"] = leaf.limited
    rewards = _turn_rewards(turns, seen)
    if rewards:
        sample.metadata["turn_rewards"] = rewards
    return sample


def _blank(base: Sample, root: Context) -> Sample:
    """A sample of `base`'s identity that holds the first prompt of a branch and no response."""
    sample = Sample(
        **{
            name: copy.deepcopy(getattr(base, name))
            for name in (
                "group_index",
                "index",
                "rollout_id",
                "prompt",
                "apply_chat_template_kwargs",
                "label",
                "reward",
                "metadata",
                "generate_function_path",
                "custom_rm_path",
                "task",
                "train_metadata",
                "session_id",
                "journal_id",
            )
        }
    )
    if sample.rollout_id is None:
        sample.rollout_id = sample.index
    sample.tokens = root.ids.tolist()
    sample.compact()
    return sample


def _turn_rewards(turns: list[Turn], seen: set[str]) -> list[tuple[int, int, float]]:
    """`(start, stop, reward)` of the turns that are trained on here, as positions of the response."""
    prompt = len(turns[0].context.ids)
    return [
        (start - prompt, stop - prompt, turn.reward)
        for turn, start, stop in placed(turns)
        if turn.reward is not None and turn.id not in seen
    ]


def _text_of(context: Context) -> str:
    """What the environment said, as text between two turns."""
    said = "\n".join(held.message.content for held in context.messages)
    return f"\n{said}\n" if said else "\n"


def _spoken(turn: Turn) -> str:
    return _words_of(turn.message) if turn.text is None else turn.text


def _words_of(message: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(part for part in (message.reasoning, message.content, *calls) if part)
