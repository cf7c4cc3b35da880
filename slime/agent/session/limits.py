"""Limits and counters of a session, and the errors that are raised when it refuses a turn.

Invariants: every refusal has its own exception type and a message of one sentence; the endpoints choose their answer to
the client by the type. `turns == extended + forked` (`SessionCounters`). A fork adds one leaf, so a session of `n > 0`
turns has `1 + forked` leaves. `trained_tokens` are the sampled tokens of recorded turns, without those that the gate
masked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Literal

from slime.storage.json_types import JsonMapping

LimitKind = Literal["turns", "tokens", "context", "deadline"]


class SessionRefusal(Exception):
    """A session refuses a turn."""


class ContinuationRefused(SessionRefusal):
    """The history cannot be continued token by token, with this template or under `--strict-tokens`."""


class TemplateRefused(ContinuationRefused):
    """The chat template cannot render this conversation; the message is one sentence."""


class SessionClosed(SessionRefusal):
    """The session has ended."""


class LimitReached(SessionRefusal):
    """The session has reached the limit `kind`."""

    def __init__(self, kind: LimitKind, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class PromptExceedsContext(LimitReached):
    """The prompt has `tokens` tokens; with more than `maximum` there is no room for an answer."""

    def __init__(self, tokens: int, maximum: int) -> None:
        super().__init__("context", f"prompt is too long: {tokens} tokens > {maximum} maximum")
        self.tokens = tokens
        self.maximum = maximum


@dataclass(frozen=True)
class Limits:
    """Limits of one session; None means unlimited. `deadline` is a time of `clock`, which is monotonic, in seconds."""

    max_turns: int | None = None
    max_tokens: int | None = None
    """Limit on sampled tokens over all turns."""
    max_new_tokens: int | None = None
    """Limit on sampled tokens of one turn."""
    max_context: int | None = None
    """Limit on the tokens of a prompt and its answer together."""
    deadline: float | None = None
    clock: Callable[[], float] = time.monotonic

    def to_dict(self) -> dict[str, int | None]:
        """Return the limits without deadline and clock, for a process with its own clock."""
        names = ("max_turns", "max_tokens", "max_new_tokens", "max_context")
        return {name: getattr(self, name) for name in names}

    def check(self, turns: int, sampled: int) -> None:
        """Raise `LimitReached` if the session may not begin another turn after this many turns and sampled tokens."""
        if self.deadline is not None and self.clock() >= self.deadline:
            raise LimitReached("deadline", "the deadline of this session has passed")
        if self.max_turns is not None and turns >= self.max_turns:
            raise LimitReached("turns", f"this session has reached its limit of {self.max_turns} turns")
        if self.max_tokens is not None and sampled >= self.max_tokens:
            raise LimitReached("tokens", f"this session has sampled {sampled} tokens of at most {self.max_tokens}")

    def new_tokens(self, prompt: int, sampled: int, asked: int | None) -> int | None:
        """Return the most tokens that a turn after `prompt` tokens may have, None if unlimited.

        Raises `PromptExceedsContext` if the prompt leaves no room in the context.
        """
        if self.max_context is not None and prompt >= self.max_context:
            raise PromptExceedsContext(prompt, self.max_context - 1)
        bounds = [
            asked,
            self.max_new_tokens,
            None if self.max_tokens is None else self.max_tokens - sampled,
            None if self.max_context is None else self.max_context - prompt,
        ]
        return min((bound for bound in bounds if bound is not None), default=None)


@dataclass
class SessionCounters:
    """Counters of one session, which can be summed over sessions.

    `sampled_tokens` include the tokens of abandoned turns, which are not trained on.
    """

    turns: int = 0
    extended: int = 0
    forked: int = 0
    refused: int = 0
    abandoned: int = 0
    sampled_tokens: int = 0
    abandoned_tokens: int = 0
    trained_tokens: int = 0
    retokenised_tokens: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    samples: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: JsonMapping) -> SessionCounters:
        """Inverse of `to_dict`; a missing counter is 0."""
        return cls(**{field.name: int(values.get(field.name, 0)) for field in fields(cls)})
