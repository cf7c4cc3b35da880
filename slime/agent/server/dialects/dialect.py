"""The interface of a dialect: a pure translator between a client's API and the server, without sockets or sessions.

Invariants: for any request body `asked` either returns or raises `Problem`, and raises nothing else. A streamed answer
has the same content as the answer that `whole` returns at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from slime.agent.messages import TurnRequest
from slime.models.parsers.events import Event, ParsedOutput
from slime.storage.json_types import JsonObject


class Kind(StrEnum):
    """The reasons for which a request gets no turn."""

    NO_SESSION = "no_session"  # no key, or a key that has no session
    CLOSED = "closed"  # the session was finished or dropped
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"  # the session has sampled its maximum number of tokens
    DEADLINE = "deadline"
    TOO_LONG = "too_long"  # the prompt exceeds the context: `tokens` of at most `limit`
    REFUSED = "refused"  # the template cannot be continued, or a fork with --strict-tokens
    BAD_BODY = "bad_body"
    UNKNOWN_MODEL = "unknown_model"
    NO_PATH = "no_path"
    ENGINE_FAILED = "engine_failed"  # a retry may succeed
    FULL = "full"  # no capacity left: `retry_after_s` says when to retry
    SHUTTING_DOWN = "shutting_down"


class Problem(Exception):
    """An error that is reported to the client in one sentence; `param` names the invalid field of a request body."""

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
        """Copy the problem for another request: a raised exception holds references to the request that raised it."""
        return Problem(
            self.kind,
            self.message,
            param=self.param,
            tokens=self.tokens,
            limit=self.limit,
            retry_after_s=self.retry_after_s,
        )

    @property
    def is_retryable(self) -> bool:
        """True if a retry of the same request may succeed. For all other kinds a client must not retry."""
        return self.kind in (Kind.ENGINE_FAILED, Kind.FULL)


@dataclass(frozen=True)
class Asked:
    """A parsed request.

    `count_only`: the client wants the token count of the prompt and no turn; answer with `Dialect.counted`. `notes` are
    sentences for the log about parts of the request that were ignored. `own` is state that the dialect needs for its
    answer.
    """

    request: TurnRequest
    model: str
    stream: bool = False
    include_usage: bool = True
    want_log_probs: bool = False
    count_only: bool = False
    notes: tuple[str, ...] = ()
    own: object = None


@dataclass(frozen=True)
class Usage:
    """Token counts that are reported to the client; `cached` prompt tokens were already in the session."""

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0


@dataclass(frozen=True)
class TokenLogProb:
    """One sampled token; `raw` are its bytes, which may be part of a character."""

    token: str
    raw: bytes
    log_prob: float


@dataclass(frozen=True)
class FinishedTurn:
    """A recorded turn. `reference` is its id; the stream writer of the turn was created with the same id.

    `finish_reason` is "stop", "tool_calls", "length" or "abort". `log_probs` cover every sampled token, including those
    of reasoning, calls and marks; they are None if the client did not request them.
    """

    reference: str
    output: ParsedOutput
    finish_reason: str
    usage: Usage
    log_probs: Sequence[TokenLogProb] | None = None


class StreamWriter(Protocol):
    """Encodes one streamed answer as bytes: `begin`, then events and keep-alives, then `end` or `problem`."""

    def begin(self) -> bytes: ...

    def event(self, event: Event) -> bytes:
        """Encode new model output; returns b"" if the output is held back."""
        ...

    def keep_alive(self) -> bytes:
        """Encode a keep-alive, which is valid at any point of the stream."""
        ...

    def end(self, finished: FinishedTurn) -> bytes: ...

    def problem(self, problem: Problem) -> bytes:
        """Encode the end of a stream that fails after its beginning was sent."""
        ...


class Dialect(Protocol):
    """An API that clients use. Header names are case-insensitive."""

    name: str
    paths: tuple[str, ...]  # of POST requests

    def key(self, headers: Mapping[str, str]) -> str | None:
        """The session key: the first present of bearer token, `x-api-key`, `x-slime-session` and `x-session-id`."""
        ...

    def asked(self, path: str, body: object, headers: Mapping[str, str]) -> Asked:
        """Translate a request; `body` is the parsed JSON, of any type. Raises `Problem`."""
        ...

    def writer(self, asked: Asked, turn_ref: str) -> StreamWriter:
        """A writer for the stream of this answer; its turn will be recorded under the id `turn_ref`."""
        ...

    def whole(self, asked: Asked, finished: FinishedTurn) -> JsonObject:
        """The complete, non-streamed answer, as JSON values."""
        ...

    def counted(self, tokens: int) -> JsonObject:
        """The answer to a `count_only` request."""
        ...

    def problem(self, problem: Problem) -> tuple[int, dict[str, str], JsonObject]:
        """Status, headers and body of an error; they make a client stop at once, or retry if a retry may succeed."""
        ...
