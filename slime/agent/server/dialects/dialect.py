"""What every dialect is to the server: a pure translator, that knows neither sockets nor sessions.

Invariant: whatever body a client sends, `asked` returns or raises `Problem`, never anything else; and what a stream
tells piece by piece is what `whole` tells at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from slime.agent.messages import TurnRequest
from slime.models.parsers.events import Event, Output


class Kind(StrEnum):
    """Why a request gets no turn."""

    NO_SESSION = "no_session"  # no key, or the key of no session
    CLOSED = "closed"  # the session was finished or dropped
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"  # the session has sampled all the tokens it may
    DEADLINE = "deadline"
    TOO_LONG = "too_long"  # the prompt does not fit into the context: `tokens` of at most `limit`
    REFUSED = "refused"  # a template that cannot be continued, or a fork with --strict-tokens
    BAD_BODY = "bad_body"
    UNKNOWN_MODEL = "unknown_model"
    NO_PATH = "no_path"
    ENGINE_FAILED = "engine_failed"  # may go better if the client asks again
    FULL = "full"  # nobody else can be served now: `retry_after_s` says when to ask again
    SHUTTING_DOWN = "shutting_down"


class Problem(Exception):
    """One sentence for the client; `param` names the field of a bad body."""

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        param: str | None = None,
        tokens: int | None = None,
        limit: int | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.tokens = tokens
        self.limit = limit
        self.retry_after_s = retry_after_s

    def again(self) -> Problem:
        """The same problem for another request: an exception that was raised keeps that request alive."""
        return Problem(
            self.kind,
            self.message,
            param=self.param,
            tokens=self.tokens,
            limit=self.limit,
            retry_after_s=self.retry_after_s,
        )

    @property
    def ask_again(self) -> bool:
        """Whether the same request may be answered later. Of all others a client must not make a second one."""
        return self.kind in (Kind.ENGINE_FAILED, Kind.FULL)


@dataclass(frozen=True)
class Asked:
    """A body, understood.

    `count_only`: the client wants to know how many tokens the prompt has, and no turn: answer with `Dialect.counted`.
    `notes` are sentences for the log, about what was left out of the request. `own` is what the dialect keeps for its
    answer.
    """

    request: TurnRequest
    model: str
    stream: bool = False
    include_usage: bool = True
    want_log_probs: bool = False
    count_only: bool = False
    notes: tuple[str, ...] = ()
    own: Any = None


@dataclass(frozen=True)
class Usage:
    """Tokens as the client is to count them; `cached` of the prompt's were held already."""

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0


@dataclass(frozen=True)
class TokenLogProb:
    """One sampled token; `raw` are its bytes, which need not be whole characters."""

    token: str
    raw: bytes
    log_prob: float


@dataclass(frozen=True)
class Finished:
    """A turn that is recorded. `reference` is its id, the one that the writer of its stream was made with.

    `finish_reason` is "stop", "tool_calls", "length" or "abort". `log_probs` cover every sampled token, those of
    reasoning, calls and marks too, and are None where the client did not want them.
    """

    reference: str
    output: Output
    finish_reason: str
    usage: Usage
    log_probs: Sequence[TokenLogProb] | None = None


class StreamWriter(Protocol):
    """One streamed answer as bytes: `begin`, then events and keep-alives, then `end` or `problem`."""

    def begin(self) -> bytes: ...

    def event(self, event: Event) -> bytes:
        """The bytes for what the model wrote just now; b"" where they are held back."""
        ...

    def keep_alive(self) -> bytes:
        """What shows the client, at any moment, that its answer is still on the way."""
        ...

    def end(self, finished: Finished) -> bytes: ...

    def problem(self, problem: Problem) -> bytes:
        """The end of a stream that fails half-way."""
        ...


class Dialect(Protocol):
    """A client's language. Header names are looked up whatever their case."""

    name: str
    paths: tuple[str, ...]  # of POST requests

    def key(self, headers: Mapping[str, str]) -> str | None:
        """The key of the session: bearer token, `x-api-key`, `x-slime-session`, `x-session-id`: the first there is."""
        ...

    def asked(self, path: str, body: object, headers: Mapping[str, str]) -> Asked:
        """What the client asks for (`body`: the parsed JSON, of any type). Raises `Problem`."""
        ...

    def writer(self, asked: Asked, turn_ref: str) -> StreamWriter:
        """The stream of this answer, whose turn is going to be recorded under the id `turn_ref`."""
        ...

    def whole(self, asked: Asked, finished: Finished) -> dict[str, Any]:
        """The answer in one piece, as JSON values."""
        ...

    def counted(self, tokens: int) -> dict[str, Any]:
        """The answer to a request that is `count_only`."""
        ...

    def problem(self, problem: Problem) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and body that end a client of this dialect at once, or have it ask again where that helps."""
        ...
