"""The base of dialects: pure translators between a client's API and the server, without sockets or sessions.

Invariants: for any request body `asked` either returns or raises `Problem`, and raises nothing else. A streamed answer
has the same content as the answer that `whole` returns at once.

HTTP statuses make each API's clients retry or stop as intended. Invariant: a problem that a retry cannot solve is never
408, 409, 429 or 5xx and carries `x-should-retry: false`, so that an agent stops at once and does not spend minutes of
its sandbox on retries. The reaction of clients to each status was tested with Claude Code and Codex, and read in the
sources of mini-swe-agent and Qwen Code:

- Claude Code (messages) and Codex (responses) retry after 401, Claude Code without a stream after 404: always 400.
- mini-swe-agent (chat) retries after 400, ten times, but not after 401, 404 or a prompt that is too long, nor do
  Qwen Code and, as it seems, opencode: a session that is over is "not found" there.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slime.agent.messages import TurnRequest
from slime.agent.server.dialects.errors import Kind, Problem, openai_error
from slime.models.parsers.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    IllFormed,
    ParsedOutput,
    Reasoning,
    Text,
)
from slime.storage.json_types import JsonMapping, JsonObject


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

    @property
    def is_cut(self) -> bool:
        """True for a turn that was cut off, even inside a call."""
        return self.finish_reason in ("length", "abort")


class StreamWriter(ABC):
    """Encodes one streamed answer as server-sent events: `begin`, then events and keep-alives, then `end` or `problem`.

    Invariants: text is sent as it is sampled, a call only when it has ended. A call that breaks off or cannot be parsed
    becomes text; a client that had seen its beginning would run it, or send back a call that its session does not hold.
    White space alone is never a block of its own: it is held back until text of the same kind follows, and dropped if
    none follows before the next block. No client keeps a message of white space; several refuse one.
    """

    def __init__(self, asked: Asked, turn_ref: str) -> None:
        self._asked, self._reference = asked, turn_ref
        self._inside: type | None = None
        self._waiting_for: type | None = None
        self._blank = ""
        self._begun: dict[int, CallBegun] = {}
        self._arguments: dict[int, list[str]] = {}

    @abstractmethod
    def begin(self) -> bytes: ...

    @abstractmethod
    def encode(self, shown: Event) -> bytes:
        """Encode text that is not blank, or the beginning or all arguments of a call that has ended."""

    @abstractmethod
    def end(self, finished: FinishedTurn) -> bytes: ...

    @abstractmethod
    def problem(self, problem: Problem) -> bytes:
        """Encode the end of a stream that fails after its beginning was sent."""

    def keep_alive(self) -> bytes:
        """Encode a keep-alive, which is valid at any point of the stream."""
        return b": waiting\n\n"

    def event(self, event: Event) -> bytes:
        """Encode new model output; returns b"" if the output is held back."""
        if type(event) is self._inside:
            assert isinstance(event, Reasoning | Text)
            return self.encode(event) if event.text else b""
        return b"".join(map(self.encode, self._released(event)))

    def _released(self, event: Event) -> Iterator[Event]:
        match event:
            case Reasoning() | Text():
                kind = type(event)
                if self._waiting_for is not kind:
                    self._blank = ""
                self._waiting_for = kind
                text = self._blank + event.text
                if not text.strip():
                    self._blank = text
                    return
                self._inside, self._blank = kind, ""
                yield kind(text)
            case CallBegun():
                self._begun[event.index], self._arguments[event.index] = event, []
            case CallArguments():
                self._arguments[event.index].append(event.text)
            case CallEnded():
                self._inside, self._blank = None, ""
                yield self._begun[event.index]
                yield CallArguments(event.index, "".join(self._arguments[event.index]))
            case IllFormed():
                pass  # the call follows as text


class Dialect(ABC):
    """An API that clients use."""

    name: str
    paths: tuple[str, ...]  # of POST requests
    writer: type[StreamWriter]
    """The writer for the stream of an answer, whose turn will be recorded under this id."""
    statuses: Mapping[Kind, int] = {Kind.NO_PATH: 404, Kind.ENGINE_FAILED: 500, Kind.FULL: 429}
    """The HTTP status of each problem; 400 for all others."""

    @abstractmethod
    def asked(self, path: str, body: object) -> Asked:
        """Translate a request; `body` is the parsed JSON, of any type. Raises `Problem`."""

    @abstractmethod
    def whole(self, asked: Asked, finished: FinishedTurn) -> JsonObject:
        """The complete, non-streamed answer, as JSON values."""

    @abstractmethod
    def counted(self, tokens: int) -> JsonObject:
        """The answer to a `count_only` request."""

    def error(self, problem: Problem) -> JsonObject:
        """The body of an error response."""
        return openai_error(problem)

    def problem(self, problem: Problem) -> tuple[int, dict[str, str], JsonObject]:
        """Status, headers and body of an error; they make a client stop at once, or retry if a retry may succeed."""
        headers = {"x-should-retry": "true" if problem.is_retryable else "false"}
        if problem.kind is Kind.FULL:
            headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
        return self.statuses.get(problem.kind, 400), headers, self.error(problem)


ascii_json = json.JSONEncoder(separators=(",", ":")).encode
"""Encodes JSON in ASCII, so that no client takes a character of the text for the end of a line."""


def sse_data(value: JsonMapping) -> bytes:
    """Encode a server-sent event without a name."""
    return f"data: {ascii_json(value)}\n\n".encode()


def sse_named(value: JsonMapping) -> bytes:
    """Encode an event whose name is its type, as in the Responses and the Messages API."""
    return f"event: {value['type']}\ndata: {ascii_json(value)}\n\n".encode()


def has_visible_text(text: str | None) -> bool:
    """True if a non-streamed answer includes this text; a stream holds back the same text."""
    return bool(text and text.strip())
