"""Upstream's `TrajectoryManager`: a tree of turns by their tokens, for prompts that the caller renders.

Invariant: a turn continues the deepest turn whose ids, history included, are a prefix of its prompt; the rest of the
prompt is context. A client that renders its history again and gets other tokens starts a branch. No sampled turn is
removed from training or overwritten: each is trained on once.

`slime.agent.session.session.Session` is for prompts that are never rendered again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.agent.messages import Message, ToolCall
from slime.agent.session.records import session_samples
from slime.agent.session.tree import Context, Held, Tree, Turn, path
from slime.data.sample import Reward, Sample

__all__ = ["TrajectoryManager", "TurnRecord"]


@dataclass
class TurnRecord:
    """One engine call: the prompt ids, the sampled ids, and their log-probs if known."""

    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str
    output_log_probs: list[float] = field(default_factory=list)
    ill_formed: bool = False


@dataclass
class _Trajectory:
    tree: Tree = field(default_factory=Tree)
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)
    without_log_probs: set[str] = field(default_factory=set)


class TrajectoryManager:
    """Trajectories by session id.

    `fork_threshold_tokens` is upstream's limit up to which a short turn with a different rendering is overwritten. It
    is accepted and has no effect, since sampled turns are never overwritten here.
    """

    def __init__(self, *, fork_threshold_tokens: int = 1024) -> None:
        self.fork_threshold_tokens = fork_threshold_tokens
        self._trajectories: dict[str, _Trajectory] = {}

    def has_session(self, sid: str) -> bool:
        """Return True if a turn was recorded under this id."""
        return sid in self._trajectories

    def turn_count(self, sid: str) -> int:
        """Return the number of turns recorded under this id."""
        return len(self._trajectories[sid].tree.turns) if sid in self._trajectories else 0

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: Sequence[Mapping[str, Any]],
        response_message: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a turn to the tree by its prompt's ids; `metadata` is added to the samples that contain the turn."""
        prompt, ids = np.array(turn.prompt_ids, np.int32), np.array(turn.output_ids, np.int32)
        log_probs = np.array(turn.output_log_probs or np.zeros(len(ids)), np.float32)
        if len(log_probs) != len(ids):
            raise ValueError(f"a turn of {len(ids)} tokens came with {len(log_probs)} log-probs")
        if not len(prompt):
            raise ValueError("a turn needs a prompt of at least one token")
        trajectory = self._trajectories.setdefault(sid, _Trajectory())
        tree = trajectory.tree
        parent, at = _deepest(tree, prompt)
        siblings = tree.contexts_after(parent)
        context = next((known for known in siblings if np.array_equal(known.ids, prompt[at:])), None)
        if context is None:
            context = Context(tree.next_context_number(), parent, (), prompt[at:])
            tree.restore(context)
        kept = Turn(
            id=f"turn_{uuid.uuid4().hex}",
            number=len(tree.turns),
            context=context,
            held=Held(_message(response_message)),
            ids=ids,
            log_probs=log_probs,
            delivered=ids.tobytes(),
            finish_reason=turn.finish_reason,
            meta_info={},
            ill_formed=turn.ill_formed,
        )
        tree.add(kept)
        trajectory.metadata[kept.id] = dict(metadata or {})
        if len(ids) and not turn.output_log_probs:
            trajectory.without_log_probs.add(kept.id)

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: Reward | None = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int | None = None,
    ) -> list[Sample]:
        """Remove a session and return its samples: one per branch, each with the whole reward.

        A sample longer than `max_sample_tokens` is truncated; it is dropped if no response is left.
        """
        trajectory = self._trajectories.pop(sid, None)
        if trajectory is None:
            return []
        finished = session_samples(trajectory.tree, base_sample, reward, None)
        samples = []
        for leaf, sample in zip(trajectory.tree.leaves(), finished.samples, strict=True):
            turns = path(leaf)
            for turn in turns:
                sample.metadata |= trajectory.metadata[turn.id]
            sample.metadata |= dict(extra_metadata or {})
            sample.status = Sample.Status.COMPLETED
            if any(turn.id in trajectory.without_log_probs for turn in turns):
                sample.rollout_log_probs = None
            if not max_sample_tokens or _cut(sample, max_sample_tokens):
                samples.append(sample)
        return samples

    def drop_session(self, sid: str) -> None:
        """Remove a session; an unknown id is ignored."""
        self._trajectories.pop(sid, None)


def _deepest(tree: Tree, prompt: np.ndarray) -> tuple[Turn | None, int]:
    """Return the turn with the longest history that is a prefix of `prompt` (latest wins ties), and that length."""
    best: tuple[int, int, Turn | None] = (0, -1, None)
    waiting = [(context, 0) for context in tree.roots]
    while waiting:
        context, at = waiting.pop()
        if not _stands(context.ids, prompt, at):
            continue
        at += len(context.ids)
        for turn in context.turns:
            if _stands(turn.ids, prompt, at):
                after = at + len(turn.ids)
                if (after, turn.number) > best[:2]:
                    best = (after, turn.number, turn)
                waiting += [(child, after) for child in turn.contexts]
    return best[2], best[0]


def _stands(ids: np.ndarray, prompt: np.ndarray, at: int) -> bool:
    return np.array_equal(prompt[at : at + len(ids)], ids)


def _cut(sample: Sample, most: int) -> bool:
    """Truncate a sample to `most` tokens; return False if nothing of its response is left."""
    over = sample.total_length - most
    if over <= 0:
        return True
    kept = sample.response_length - over
    if kept <= 0:
        return False
    sample.tokens = sample.tokens[:most]
    sample.loss_mask = (sample.loss_mask or [])[:kept]
    if sample.rollout_log_probs is not None:
        sample.rollout_log_probs = sample.rollout_log_probs[:kept]
    sample.response_length = kept
    sample.version_spans = []
    sample.metadata["truncated"] = True
    sample.compact()
    return True


def _message(given: Mapping[str, Any]) -> Message:
    """Convert a message in OpenAI's format, keeping only the text of its content."""
    content = given.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return Message(
        role="assistant",
        content=content,
        reasoning=given.get("reasoning_content"),
        tool_calls=tuple(_call(call) for call in given.get("tool_calls") or ()),
    )


def _call(given: Mapping[str, Any]) -> ToolCall:
    function = given.get("function") or given
    arguments = function.get("arguments") or ""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(str(given.get("id") or ""), str(function.get("name") or ""), written)
