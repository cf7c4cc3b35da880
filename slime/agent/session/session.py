"""A session: one attempt at one task, whatever talks to the model meanwhile, with its tokens as they were sampled.

Invariant: the prompt of a turn is what is held of its history, id by id, and after it the rendering of what is new. A
sampled id is never rendered again where its turn is continued, so nothing that is trained on differs from what an
engine sampled; `counters.retokenised_tokens` is measured on every prompt and every finished sample, and is 0.

Sessions do no I/O and know no dialect; one task at a time calls them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from slime.agent.messages import Message, TurnRequest
from slime.agent.session.limits import Closed, Counters, LimitReached, Limits, Refused
from slime.agent.session.matching import Decision, Outcome, decide
from slime.agent.session.records import BadRecord, session_samples, tree_of, turn_record
from slime.agent.session.tree import Context, Held, Tree, Turn, joined, path, retokenised
from slime.data.sample import Reward, Sample


class Template(Protocol):
    """What a session asks of a chat template (`slime.agent.session.template.ChatTemplate`)."""

    @property
    def refusal(self) -> str | None:
        """Why turns cannot be continued, in one sentence; None where they can."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that may end an assistant's turn."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """A whole conversation up to where the model goes on."""
        ...

    def continuation(
        self, last: Message, ended_with: int | None, new: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> np.ndarray:
        """What follows the sampled ids of the turn `last`, up to where the model goes on after `new`."""
        ...


@dataclass(frozen=True)
class Prompt:
    """What to send to an engine: `ids`, of which the first `shared` were held before."""

    ids: np.ndarray
    outcome: Outcome
    node: Context
    """The place in the tree that the answer belongs to."""
    shared: int
    max_new_tokens: int | None
    """The least of what the client asks for, the session allows and the context has room for; None: no bound."""
    turn_id: str
    """What the turn is going to be called: the reference that a stream may carry before its end."""


@dataclass(frozen=True)
class Rendered:
    """The ids of what is new in a request, made apart from the session: `new` after `turn`."""

    turn: Turn | None
    new: int
    ids: np.ndarray


class Outdated(Exception):
    """The tree has grown since a request was rendered, and the request belongs elsewhere now."""


@dataclass(frozen=True)
class SampledTurn:
    """What an engine sampled: ids as it delivered them, and the message that they were read as."""

    ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    meta_info: Mapping[str, Any]
    message: Message
    text: str | None = None
    """The whole answer as text, marks of calls and reasoning included."""
    ill_formed: bool = False


@dataclass
class Session:
    """The tree of turns that came of one key."""

    key: str
    template: Template | None
    limits: Limits = field(default_factory=Limits, kw_only=True)
    strict: bool = field(default=False, kw_only=True)
    tree: Tree = field(default_factory=Tree, init=False)
    counters: Counters = field(default_factory=Counters, init=False)
    is_closed: bool = field(default=False, init=False)
    _in_flight: int = field(default=0, init=False)
    _differing_in_prompts: int = field(default=0, init=False)

    def place(self, request: TurnRequest) -> Decision:
        """Where the request belongs now, for `render`."""
        return decide(self.tree, request)

    def render(self, decision: Decision, request: TurnRequest) -> Rendered:
        """The ids of what is new; reads nothing that changes, so another thread may call it."""
        template, last = self._template(), decision.turn
        if last is None:
            ids = template.prompt(decision.new, request.tools)
        else:
            final = int(last.ids[-1]) if len(last.ids) else None
            ended_with = final if final in template.stop_ids else None
            ids = template.continuation(last.message, ended_with, decision.new, request.tools)
        kept = np.array(ids, dtype=np.int32)
        kept.flags.writeable = False
        return Rendered(last, len(decision.new), kept)

    def prepare(self, request: TurnRequest, rendered: Rendered | None = None) -> Prompt:
        """The prompt of one more turn; `record` or `abandon` must follow.

        With `rendered` nothing is tokenized; raises `Outdated` if the tree places the request elsewhere by now.
        """
        if self.is_closed:
            raise Closed("this session has ended")
        decision = decide(self.tree, request)
        try:
            self.limits.check(self.counters.turns + self._in_flight, self.counters.sampled_tokens)
            self._check_continuable(decision)
            context = decision.context or self._context(decision, request, rendered)
            history = path(decision.turn)
            ids = joined(history, context)
            bound = self.limits.new_tokens(len(ids), self.counters.sampled_tokens, request.max_tokens)
        except LimitReached as reached:
            if decision.turn is not None and decision.turn.is_leaf:
                decision.turn.limited = reached.kind
            raise
        except Refused:
            self.counters.refused += 1
            raise
        shared = len(ids) - (len(context.ids) if decision.context is None else 0)
        self._count_prompt(ids, shared, history)
        self.tree.begin(context)
        self._in_flight += 1
        return Prompt(ids, decision.outcome, context, shared, bound, f"turn_{uuid.uuid4().hex}")

    def count_tokens(self, request: TurnRequest, rendered: Rendered | None = None) -> int:
        """How many tokens the prompt of this request would have; nothing is begun or counted."""
        decision = decide(self.tree, request)
        context = decision.context or self._context(decision, request, rendered)
        return sum(len(turn.context.ids) + len(turn.ids) for turn in path(decision.turn)) + len(context.ids)

    def record(self, prompt: Prompt, turn: SampledTurn) -> Turn:
        """Keep a turn that was sampled after `prompt`."""
        ids, log_probs = _checked(turn)
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

    def abandon(self, prompt: Prompt, turn: SampledTurn | None = None) -> None:
        """The client hung up before it had the answer: what was sampled by then is counted and not trained on."""
        self._ended(prompt)
        self.counters.abandoned += 1
        if turn is not None:
            self.counters.abandoned_tokens += len(turn.ids)
            self.counters.sampled_tokens += len(turn.ids)

    def reward(self, turn_id: str, value: float) -> None:
        """Give one turn a reward of its own; several add up."""
        if turn_id not in self.tree.turns:
            raise KeyError(f"session has no turn {turn_id!r}")
        turn = self.tree.turns[turn_id]
        turn.reward = float(value) + (turn.reward or 0.0)

    def to_record(self) -> dict[str, Any]:
        """All of the session as plain values and arrays; turns that are being sampled are not part of it."""
        return {
            "key": self.key,
            "closed": self.is_closed,
            "differing": self._differing_in_prompts,
            "counters": self.counters.to_dict(),
            "turns": [turn_record(turn) for turn in self.tree.turns.values()],
        }

    def turn_record(self, turn: Turn) -> dict[str, Any]:
        """What a turn added, with the counters after it; `from_turns` takes all of a session's together."""
        return {"turn": turn_record(turn), "counters": self.counters.to_dict(), "differing": self._differing_in_prompts}

    @classmethod
    def from_record(
        cls,
        record: Mapping[str, Any],
        template: Template | None = None,
        *,
        limits: Limits | None = None,
        strict: bool = False,
    ) -> Session:
        """The session of `to_record`, or a `BadRecord`; without a template it can be finished, not continued."""
        try:
            session = cls(str(record["key"]), template, limits=limits or Limits(), strict=strict)
            session.tree = tree_of(record["turns"])
            session.counters = Counters.from_dict(record["counters"])
            session.is_closed = bool(record["closed"])
            session._differing_in_prompts = int(record["differing"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRecord(f"a session cannot be read: {type(error).__name__}: {error}") from error
        return session

    @classmethod
    def from_turns(
        cls,
        key: str,
        records: Sequence[Mapping[str, Any]],
        template: Template | None = None,
        *,
        limits: Limits | None = None,
        strict: bool = False,
    ) -> Session:
        """The session of these records of `turn_record`, or a `BadRecord`."""
        try:
            last = max(records, key=lambda record: record["turn"]["number"])
            whole = {**last, "key": key, "closed": False, "turns": [record["turn"] for record in records]}
        except (KeyError, TypeError, ValueError) as error:
            raise BadRecord(f"a session cannot be read: {type(error).__name__}: {error}") from error
        return cls.from_record(whole, template, limits=limits, strict=strict)

    def close(self) -> None:
        """No turn begins any more; one that is being sampled may still be recorded."""
        self.is_closed = True

    def messages(self, turn: Turn) -> list[Message]:
        """What was said from the beginning up to `turn`."""
        return [
            message
            for step in path(turn)
            for message in (*(held.message for held in step.context.messages), step.message)
        ]

    def samples(
        self,
        base: Sample,
        reward: Reward | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        args: Any = None,
    ) -> list[Sample]:
        """The leaves as samples of the rollout that `base` was dispatched for (`slime.agent.session.records`)."""
        finished = session_samples(self.tree, base, reward, metadata, args)
        self.counters.samples = len(finished.samples)
        self.counters.trained_tokens = finished.trained_tokens
        self.counters.retokenised_tokens = self._differing_in_prompts + finished.retokenised_tokens
        if finished.samples:
            finished.samples[0].metadata["session"] = self.counters.to_dict()
        return finished.samples

    def _check_continuable(self, decision: Decision) -> None:
        template = self._template()
        if decision.turn is not None and template.refusal is not None:
            raise Refused(f"this model's chat template cannot be continued turn by turn: {template.refusal}")
        if self.strict and decision.outcome is Outcome.FORKED:
            raise Refused(
                "--strict-tokens: this request does not go on from the end of the session's turns, the client has "
                "edited, compacted or branched its history"
            )

    def _context(self, decision: Decision, request: TurnRequest, rendered: Rendered | None) -> Context:
        if rendered is None:
            rendered = self.render(decision, request)
        elif rendered.turn is not decision.turn or rendered.new != len(decision.new):
            raise Outdated
        return Context(
            number=self.tree.next_context_number(),
            parent=decision.turn,
            messages=tuple(Held(message) for message in decision.new),
            ids=rendered.ids,
            tools=request.tools if decision.turn is None else (),
        )

    def _template(self) -> Template:
        if self.template is None:
            raise Refused("this session was read back without a chat template: it can be finished, not continued")
        return self.template

    def _count_prompt(self, ids: np.ndarray, shared: int, history: list[Turn]) -> None:
        self.counters.prompt_tokens += len(ids)
        self.counters.shared_tokens += shared
        self._differing_in_prompts += retokenised(ids, history)
        self.counters.retokenised_tokens = self._differing_in_prompts

    def _ended(self, prompt: Prompt) -> None:
        self.tree.end(prompt.node)
        self._in_flight -= 1


def _checked(turn: SampledTurn) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs of a turn as arrays of our own, as many of one as of the other."""
    ids, log_probs = np.asarray(turn.ids), np.array(turn.log_probs, dtype=np.float32)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu") or ids.shape != log_probs.shape:
        raise ValueError(f"a turn needs ids and as many log-probs, not {ids.dtype}{ids.shape} and {log_probs.shape}")
    if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        raise ValueError(f"token ids lie between 0 and 2**31 - 1, not {ids.min()} and {ids.max()}")
    if not np.isfinite(log_probs).all():
        raise ValueError("the log-probs of a turn must be finite")
    kept = ids.astype(np.int32)
    for column in (kept, log_probs):
        column.flags.writeable = False
    return kept, log_probs
