"""The leaves of a session's tree as samples of one rollout.

Invariants: a sampled token is trained on in one sample, the first that it is part of, and is context in the others;
what nobody sampled is trained on in none. The prompt of a sample is the first prompt of its branch, the response is
everything after it. All samples have the identity of the one that was dispatched, and its reward each: statistics count
the rollout once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.agent.messages import Message
from slime.agent.session.tree import Context, Tree, Turn, path, placed, retokenised
from slime.data.sample import Reward, Sample

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
