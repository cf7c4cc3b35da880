"""Turns and sessions as plain values and back, and sessions as training samples.

Plain values go into the turn journal and from one process to another. Samples are made of the leaves of a session's
tree, one sample per leaf.

Invariants: a tree that was read back gives the same prompts and the same samples. A record holds what its turn added
and nothing of its history, so the records of a session grow linearly with the session. Inconsistent records raise
`BadRecord` and never give a partial tree. A sampled token is trained on in one sample, the first that contains it, and
is context in the others; tokens that were not sampled are never trained on. The prompt of a sample is the first prompt
of its branch, the response is everything after it. All samples have the identity and the reward of the dispatched
sample: statistics count the rollout once.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import numpy as np

from slime.agent.messages import Message, Role, ToolCall
from slime.agent.session.limits import LimitKind
from slime.agent.session.tree import Context, Held, Tree, Turn, count_retokenised, path, token_ranges
from slime.data.sample import Reward, Sample
from slime.storage.json_types import JsonMapping, JsonObject

_ROLES, _KINDS = get_args(Role), get_args(LimitKind)


_TURN_FIELDS = (
    *("id", "number", "ids", "log_probs", "delivered", "finish_reason", "meta_info", "text"),
    *("ill_formed", "reward", "limited"),
)


class BadRecord(Exception):
    """Records that no session wrote."""


def turn_record(turn: Turn) -> JsonObject:
    """Return a turn as plain values, together with its context if it is the first turn after it."""
    context: JsonObject | int = turn.context.number
    if turn.context.turns[0] is turn:
        context = {
            "number": turn.context.number,
            "parent": None if turn.context.parent is None else turn.context.parent.id,
            "messages": [message_record(held.message) for held in turn.context.messages],
            "ids": turn.context.ids,
            "tools": [dict(tool) for tool in turn.context.tools],
        }
    plain = {name: getattr(turn, name) for name in _TURN_FIELDS}
    return {**plain, "context": context, "message": message_record(turn.message)}


def tree_of(records: Iterable[JsonMapping]) -> Tree:
    """Build the tree of these turn records, which may be in any order."""
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


def message_record(message: Message) -> JsonObject:
    """Return a message as plain values."""
    plain = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return {**plain, "tool_calls": [[call.id, call.name, call.arguments] for call in message.tool_calls]}


def message_of(record: JsonMapping) -> Message:
    """Inverse of `message_record`."""
    calls = tuple(ToolCall(*map(_text, call)) for call in record["tool_calls"])
    if record["role"] not in _ROLES:
        raise BadRecord(f"a message has the unknown role {record['role']!r}")
    return Message(
        role=record["role"],
        content=_text(record["content"]),
        tool_calls=calls,
        **{name: _text_or_none(record[name]) for name in ("reasoning", "tool_call_id", "name", "reference")},
    )


def _add(tree: Tree, contexts: dict[int, Context], record: JsonMapping) -> None:
    """Add a recorded turn to the tree, and its context if the record has it."""
    if record["number"] != len(tree.turns):
        raise BadRecord(f"turn {len(tree.turns)} is missing")
    number = record["context"]
    if not isinstance(number, int):
        added: JsonMapping = number
        number = int(added["number"])
        if number in contexts:
            raise BadRecord(f"context {number} is recorded twice")
        contexts[number] = Context(
            number=number,
            parent=None if added["parent"] is None else tree.turns[added["parent"]],
            messages=tuple(Held(message_of(message)) for message in added["messages"]),
            ids=_array(added["ids"], np.int32),
            tools=tuple(added["tools"]),
        )
        tree.restore(contexts[number])
    ids, log_probs = _array(record["ids"], np.int32), _array(record["log_probs"], np.float32)
    delivered = bytes(record["delivered"])
    if len(ids) != len(log_probs) or len(delivered) != ids.nbytes:
        raise BadRecord(
            f"turn {record['number']} has {len(ids)} ids, {len(log_probs)} log-probs "
            f"and {len(delivered)} delivered bytes"
        )
    if record["limited"] not in (None, *_KINDS):
        raise BadRecord(f"turn {record['number']} was ended by an unknown limit, {record['limited']!r}")
    turn = Turn(
        id=_text(record["id"]),
        number=record["number"],
        context=contexts[number],
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
        raise BadRecord(f"two turns have the id {turn.id}")
    tree.add(turn)


def _array(values: object, dtype: type) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.can_cast(array.dtype, dtype, "same_kind")):
        raise BadRecord(f"an array of {array.dtype}{array.shape} is not a column of {np.dtype(dtype)}")
    array = array.astype(dtype)
    array.flags.writeable = False
    return array


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{value!r:.80} is not text")
    return value


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text(value)


_BASE_FIELDS = (
    *("group_index", "index", "rollout_id", "prompt", "apply_chat_template_kwargs", "label", "reward", "metadata"),
    *("generate_function_path", "custom_rm_path", "task", "train_metadata", "session_id", "journal_id"),
)
"""The fields that the samples of a session take from the dispatched sample."""
_ROUTED = ("routed_experts", "routed_experts_start_len")
"""Metadata that later turns of a branch continue from, even if this turn is trained on in another sample."""


@dataclass(frozen=True)
class SessionSamples:
    """The samples of a session, with the tokens counted while they were made."""

    samples: list[Sample]
    trained_tokens: int
    retokenised_tokens: int


def session_samples(
    tree: Tree,
    base: Sample,
    reward: Reward | None,
    metadata: JsonMapping | None,
    args: argparse.Namespace | None = None,
) -> SessionSamples:
    """Make one sample per leaf, in the order in which the leaves were sampled; no samples without a turn.

    Without `reward` the reward is the sum of the turns' rewards, if any turn has one.
    """
    total: float | None = None
    if reward is None:
        given = [turn.reward for turn in tree.turns.values() if turn.reward is not None]
        total = sum(given) if given else None
        reward = total
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
        differing += count_retokenised(sample.token_array(), turns)
        samples.append(sample)
    return SessionSamples(samples, trained_tokens, differing)


def _sample_of(base: Sample, turns: list[Turn], seen: set[str], args: argparse.Namespace | None) -> Sample:
    """Make the sample of one branch; the turns in `seen` are trained on in another sample."""
    leaf = turns[-1]
    sample = Sample(**{name: copy.deepcopy(getattr(base, name)) for name in _BASE_FIELDS})
    if sample.rollout_id is None:
        sample.rollout_id = sample.index
    sample.tokens = turns[0].context.ids.tolist()
    sample.compact()
    for turn in turns:
        if turn is not turns[0]:
            said = "\n".join(held.message.content for held in turn.context.messages)
            sample.append_response_tokens(
                tokens=turn.context.ids, trainable=False, text=f"\n{said}\n" if said else "\n"
            )
        if turn.id in seen:
            routed = {name: turn.meta_info[name] for name in _ROUTED if name in turn.meta_info}
            sample.append_response_tokens(
                args, tokens=turn.ids, trainable=False, meta_info=routed, text=_turn_text(turn)
            )
        else:
            sample.append_response_tokens(
                args, tokens=turn.ids, log_probs=turn.log_probs, meta_info=turn.meta_info, text=_turn_text(turn)
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
    prompt = len(turns[0].context.ids)
    rewards = [
        (start - prompt, stop - prompt, turn.reward)  # positions in the response
        for turn, start, stop in token_ranges(turns)
        if turn.reward is not None and turn.id not in seen
    ]
    if rewards:
        sample.metadata["turn_rewards"] = rewards
    return sample


def _turn_text(turn: Turn) -> str:
    """Return the text of a turn as it was sampled, else the text of its message."""
    if turn.text is not None:
        return turn.text
    message = turn.message
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(part for part in (message.reasoning, message.content, *calls) if part)
