"""A session: one attempt at one task, by any client of the model, with its tokens as they were sampled.

Invariant: the prompt of a turn is the recorded ids of its history, unchanged, followed by the rendering of the new
messages. Sampled ids are never re-tokenized when their turn is continued, so the tokens trained on are the tokens that
an engine sampled; `counters.retokenised_tokens` is measured on every prompt and every finished sample, and is 0.

Sessions do no I/O, do not depend on an API dialect, and are called by one task at a time.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slime.agent.messages import Message, TurnRequest
from slime.agent.session.limits import (
    ContinuationRefused,
    LimitReached,
    Limits,
    SessionClosed,
    SessionCounters,
)
from slime.agent.session.records import BadRecord, session_samples, tree_of, turn_record
from slime.agent.session.tree import (
    Context,
    Decision,
    Held,
    MatchOutcome,
    Tree,
    Turn,
    concatenate_ids,
    count_retokenised,
    decide,
    path,
)
from slime.data.sample import Reward, Sample
from slime.storage.json_types import JsonMapping, JsonObject


class Template(Protocol):
    """Interface of the chat template of a session (`slime.agent.session.template.ChatTemplate`)."""

    @property
    def refusal(self) -> str | None:
        """The reason why turns cannot be continued, in one sentence; None if they can."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that may end an assistant turn."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[JsonMapping]) -> np.ndarray:
        """Return the ids of a whole conversation, with the generation prompt."""
        ...

    def continuation(
        self, last: Message, ended_with: int | None, new: Sequence[Message], tools: Sequence[JsonMapping]
    ) -> np.ndarray:
        """Return the ids after the sampled ids of the turn `last`: the messages `new` and the generation prompt."""
        ...


@dataclass(frozen=True)
class Prompt:
    """The ids to send to an engine; the first `shared` of them were in the tree before."""

    ids: np.ndarray
    outcome: MatchOutcome
    node: Context
    """The context in the tree that the answer follows."""
    shared: int
    max_new_tokens: int | None
    """The smallest of the client's limit, the session's limit and the room in the context; None: unlimited."""
    turn_id: str
    """The id of the turn, which a stream may send as its reference before the turn ends."""


@dataclass(frozen=True)
class SampledTurn:
    """An answer as an engine sampled it: the delivered ids, and the message that they were parsed to."""

    ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    meta_info: JsonMapping
    message: Message
    text: str | None = None
    """The whole answer as text, including the markup of calls and reasoning."""
    ill_formed: bool = False


@dataclass
class Session:
    """The tree of turns that were sampled under one key."""

    key: str
    template: Template | None
    limits: Limits = field(default_factory=Limits, kw_only=True)
    strict: bool = field(default=False, kw_only=True)
    tree: Tree = field(default_factory=Tree, init=False)
    counters: SessionCounters = field(default_factory=SessionCounters, init=False)
    is_closed: bool = field(default=False, init=False)
    _in_flight: set[str] = field(default_factory=set, init=False)
    _differing_in_prompts: int = field(default=0, init=False)

    def render(self, place: Decision, request: TurnRequest) -> np.ndarray:
        """Render the new messages of a request to ids; `place` is its place in the tree (`decide`).

        It reads only immutable state, so another thread may call it.
        """
        template, last = self._template(), place.turn
        if last is None:
            ids = template.prompt(place.new, request.tools)
        else:
            final = int(last.ids[-1]) if len(last.ids) else None
            ended_with = final if final in template.stop_ids else None
            ids = template.continuation(last.message, ended_with, place.new, request.tools)
        kept = np.array(ids, dtype=np.int32)
        kept.flags.writeable = False
        return kept

    def prepare(
        self, request: TurnRequest, place: Decision | None = None, rendered: np.ndarray | None = None
    ) -> Prompt:
        """Return the prompt of one more turn; `record` or `abandon` must follow.

        `place` is the current place of the request in the tree, if it is known, and `rendered` are the ids of its new
        messages (`render`), if they are.
        """
        if self.is_closed:
            raise SessionClosed("this session has ended")
        place = place or decide(self.tree, request)
        try:
            self.limits.check(self.counters.turns + len(self._in_flight), self.counters.sampled_tokens)
            template = self._template()
            if place.turn is not None and template.refusal is not None:
                raise ContinuationRefused(
                    f"this model's chat template cannot be continued turn by turn: {template.refusal}"
                )
            if self.strict and place.outcome is MatchOutcome.FORKED:
                raise ContinuationRefused(
                    "--strict-tokens: this request does not continue the end of a branch of the session; the client "
                    "has edited, compacted or branched its history"
                )
            context = place.context or Context(
                ids=self.render(place, request) if rendered is None else rendered,
                number=self.tree.next_context_number(),
                parent=place.turn,
                messages=tuple(Held(message) for message in place.new),
                tools=request.tools if place.turn is None else (),
            )
            history = path(place.turn)
            ids = concatenate_ids(history, context)
            bound = self.limits.new_tokens(len(ids), self.counters.sampled_tokens, request.max_tokens)
        except LimitReached as reached:
            if place.turn is not None and place.turn.is_leaf:
                place.turn.limited = reached.kind
            raise
        except ContinuationRefused:
            self.counters.refused += 1
            raise
        shared = len(ids) - (len(context.ids) if place.context is None else 0)
        self.counters.prompt_tokens += len(ids)
        self.counters.shared_tokens += shared
        self._differing_in_prompts += count_retokenised(ids, history)
        self.counters.retokenised_tokens = self._differing_in_prompts
        if place.context is None:
            self.tree.contexts_after(place.turn).append(context)
        context.in_flight += 1
        prompt = Prompt(ids, place.outcome, context, shared, bound, f"turn_{uuid.uuid4().hex}")
        self._in_flight.add(prompt.turn_id)
        return prompt

    def count_tokens(
        self, request: TurnRequest, place: Decision | None = None, rendered: np.ndarray | None = None
    ) -> int:
        """Return the number of tokens in the prompt of this request, without beginning or counting a turn."""
        place = place or decide(self.tree, request)
        if place.context is not None:
            rendered = place.context.ids
        elif rendered is None:
            rendered = self.render(place, request)
        return sum(len(turn.context.ids) + len(turn.ids) for turn in path(place.turn)) + len(rendered)

    def record(self, prompt: Prompt, turn: SampledTurn) -> Turn:
        """Add a turn that was sampled after `prompt` to the tree."""
        ids, log_probs = np.asarray(turn.ids), np.array(turn.log_probs, dtype=np.float32)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu") or ids.shape != log_probs.shape:
            raise ValueError(
                f"a turn needs ids and equally many log-probs, not {ids.dtype}{ids.shape} and {log_probs.shape}"
            )
        if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
            raise ValueError(f"token ids must be between 0 and 2**31 - 1, not {ids.min()} and {ids.max()}")
        if not np.isfinite(log_probs).all():
            raise ValueError("the log-probs of a turn must be finite")
        ids = ids.astype(np.int32)
        for column in (ids, log_probs):
            column.flags.writeable = False
        kept = Turn(
            id=prompt.turn_id,
            number=len(self.tree.turns),
            context=prompt.node,
            held=Held(turn.message),
            ids=ids,
            log_probs=log_probs,
            delivered=np.array(turn.ids, dtype=np.int32).tobytes(),
            finish_reason=turn.finish_reason,
            meta_info=dict(turn.meta_info),
            text=turn.text,
            ill_formed=turn.ill_formed,
        )
        is_fork = self.tree.add(kept)
        self._ended(prompt)
        self.counters.turns += 1
        self.counters.forked += is_fork
        self.counters.extended += not is_fork
        self.counters.sampled_tokens += len(ids)
        return kept

    def abandon(self, prompt: Prompt, sampled: int = 0) -> None:
        """End a turn whose client disconnected: the tokens sampled so far are counted and not trained on.

        Does nothing if the turn has ended.
        """
        if prompt.turn_id not in self._in_flight:
            return
        self._ended(prompt)
        self.counters.abandoned += 1
        self.counters.abandoned_tokens += sampled
        self.counters.sampled_tokens += sampled

    def reward(self, turn_id: str, value: float) -> None:
        """Add a reward to one turn; several rewards for a turn add up."""
        if turn_id not in self.tree.turns:
            raise KeyError(f"session has no turn {turn_id!r}")
        turn = self.tree.turns[turn_id]
        turn.reward = float(value) + (turn.reward or 0.0)

    def to_record(self) -> JsonObject:
        """Return the session as plain values and arrays, without the turns that are being sampled."""
        return {
            "key": self.key,
            "closed": self.is_closed,
            "differing": self._differing_in_prompts,
            "counters": self.counters.to_dict(),
            "turns": [turn_record(turn) for turn in self.tree.turns.values()],
        }

    def turn_record(self, turn: Turn) -> JsonObject:
        """Return what a turn added, with the counters after it; `from_turns` takes all records of a session."""
        return {"turn": turn_record(turn), "counters": self.counters.to_dict(), "differing": self._differing_in_prompts}

    @classmethod
    def from_record(
        cls,
        record: JsonMapping,
        template: Template | None = None,
        *,
        limits: Limits | None = None,
        strict: bool = False,
    ) -> Session:
        """Restore the session of `to_record`, or raise `BadRecord`.

        Without a template the session can be finished, not continued.
        """
        try:
            session = cls(str(record["key"]), template, limits=limits or Limits(), strict=strict)
            session.tree = tree_of(record["turns"])
            session.counters = SessionCounters.from_dict(record["counters"])
            session.is_closed = bool(record["closed"])
            session._differing_in_prompts = int(record["differing"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRecord(f"a session cannot be read: {type(error).__name__}: {error}") from error
        return session

    @classmethod
    def from_turns(
        cls,
        key: str,
        records: Sequence[JsonMapping],
        template: Template | None = None,
        *,
        limits: Limits | None = None,
        strict: bool = False,
    ) -> Session:
        """Restore the session of these `turn_record`s, or raise `BadRecord`."""
        try:
            last = max(records, key=lambda record: record["turn"]["number"])
            whole = {**last, "key": key, "closed": False, "turns": [record["turn"] for record in records]}
        except (KeyError, TypeError, ValueError) as error:
            raise BadRecord(f"a session cannot be read: {type(error).__name__}: {error}") from error
        return cls.from_record(whole, template, limits=limits, strict=strict)

    def close(self) -> None:
        """Refuse new turns; a turn that is being sampled may still be recorded."""
        self.is_closed = True

    def messages(self, turn: Turn) -> list[Message]:
        """Return the messages from the root up to `turn`."""
        return [
            message
            for step in path(turn)
            for message in (*(held.message for held in step.context.messages), step.message)
        ]

    def samples(
        self,
        base: Sample,
        reward: Reward | None = None,
        metadata: JsonMapping | None = None,
        *,
        args: argparse.Namespace | None = None,
    ) -> list[Sample]:
        """Return the leaves as samples with the identity of `base` (`slime.agent.session.records`)."""
        finished = session_samples(self.tree, base, reward, metadata, args)
        self.counters.samples = len(finished.samples)
        self.counters.trained_tokens = finished.trained_tokens
        self.counters.retokenised_tokens = self._differing_in_prompts + finished.retokenised_tokens
        if finished.samples:
            finished.samples[0].metadata["session"] = self.counters.to_dict()
        return finished.samples

    def _template(self) -> Template:
        if self.template is None:
            raise ContinuationRefused(
                "this session was restored without a chat template: it can be finished, not continued"
            )
        return self.template

    def _ended(self, prompt: Prompt) -> None:
        self._in_flight.remove(prompt.turn_id)
        context = prompt.node
        context.in_flight -= 1
        if not context.in_flight and not context.turns:
            self.tree.contexts_after(context.parent).remove(context)
