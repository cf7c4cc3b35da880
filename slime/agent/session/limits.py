"""What a session may use up, and the ways in which it says no.

Invariant: every refusal is one sentence and a type of its own: whoever speaks to a client decides by the type how that
client is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

LimitKind = Literal["turns", "tokens", "context", "deadline"]


class SessionRefusal(Exception):
    """A turn that a session does not take."""


class Refused(SessionRefusal):
    """A history that cannot be continued token by token: by this template, or under `--strict-tokens`."""


class TemplateRefused(Refused):
    """The chat template does not take this conversation; one sentence."""


class Closed(SessionRefusal):
    """The session has ended."""


class LimitReached(SessionRefusal):
    """The session has used up what it may; `kind` says of what."""

    def __init__(self, kind: LimitKind, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class PromptTooLong(LimitReached):
    """A prompt of `tokens`, of which at most `maximum` leave room for an answer."""

    def __init__(self, tokens: int, maximum: int) -> None:
        super().__init__("context", f"prompt is too long: {tokens} tokens > {maximum} maximum")
        self.tokens = tokens
        self.maximum = maximum


@dataclass(frozen=True)
class Limits:
    """Bounds of one session; None is no bound. `deadline` is a moment of `clock`, a clock that never goes back."""

    max_turns: int | None = None
    max_tokens: int | None = None
    """Sampled, over all turns."""
    max_new_tokens: int | None = None
    """Sampled in one turn."""
    max_context: int | None = None
    """Tokens of a prompt and its answer."""
    deadline: float | None = None
    clock: Callable[[], float] = time.monotonic

    def to_dict(self) -> dict[str, int | None]:
        """The numbers, for a process with a clock of its own."""
        names = ("max_turns", "max_tokens", "max_new_tokens", "max_context")
        return {name: getattr(self, name) for name in names}

    def check(self, turns: int, sampled: int) -> None:
        """Raise if no further turn may begin after so many turns and sampled tokens."""
        if self.deadline is not None and self.clock() >= self.deadline:
            raise LimitReached("deadline", "the time of this session is over")
        if self.max_turns is not None and turns >= self.max_turns:
            raise LimitReached("turns", f"this session has had all of its {self.max_turns} turns")
        if self.max_tokens is not None and sampled >= self.max_tokens:
            raise LimitReached("tokens", f"this session has sampled {sampled} tokens of at most {self.max_tokens}")

    def new_tokens(self, prompt: int, sampled: int, asked: int | None) -> int | None:
        """How many tokens a turn after `prompt` tokens may have, if there is any bound; raises if there is no room."""
        if self.max_context is not None and prompt >= self.max_context:
            raise PromptTooLong(prompt, self.max_context - 1)
        bounds = [
            asked,
            self.max_new_tokens,
            None if self.max_tokens is None else self.max_tokens - sampled,
            None if self.max_context is None else self.max_context - prompt,
        ]
        return min((bound for bound in bounds if bound is not None), default=None)


# What happened in a session, in numbers that can be added up over sessions.
#
# Invariants: `turns == extended + forked`; a fork is a leaf more, so a session of `n > 0` turns has `1 + forked`
# leaves; `trained_tokens` are the sampled ones of recorded turns, less what the gate asked to be masked.


@dataclass
class Counters:
    """Of one session; `sampled_tokens` include those of abandoned turns, which nothing is trained on."""

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
    def from_dict(cls, values: Mapping[str, Any]) -> Counters:
        """The inverse of `to_dict`; a number that is missing is 0."""
        return cls(**{field.name: int(values.get(field.name, 0)) for field in fields(cls)})
