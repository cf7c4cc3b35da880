"""Problems that are reported to clients, and the messages, types and codes with which each API reports them."""

from __future__ import annotations

from enum import StrEnum

from slime.agent.session.limits import LimitReached, PromptExceedsContext, SessionClosed, SessionRefusal
from slime.models.openai_api import error_json
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
        return Problem(**vars(self))

    @property
    def is_retryable(self) -> bool:
        """True if a retry of the same request may succeed. For all other kinds a client must not retry."""
        return self.kind in (Kind.ENGINE_FAILED, Kind.FULL)


_LIMITS = {"turns": Kind.TURN_LIMIT, "tokens": Kind.TOKEN_LIMIT, "deadline": Kind.DEADLINE, "context": Kind.TOO_LONG}


def refusal_problem(refusal: SessionRefusal) -> Problem:
    """Convert a session's refusal into a problem for the client."""
    match refusal:
        case PromptExceedsContext():
            return Problem(Kind.TOO_LONG, str(refusal), tokens=refusal.tokens, limit=refusal.maximum)
        case LimitReached():
            return Problem(_LIMITS[refusal.kind], str(refusal))
        case SessionClosed():
            return Problem(Kind.CLOSED, str(refusal))
    return Problem(Kind.REFUSED, str(refusal))


_CODES = {
    Kind.NO_SESSION: "invalid_api_key",
    Kind.TOO_LONG: "context_length_exceeded",
    Kind.UNKNOWN_MODEL: "model_not_found",
    Kind.NO_PATH: "unknown_url",
    Kind.ENGINE_FAILED: "server_error",
    Kind.FULL: "rate_limit_exceeded",
}
_OPENAI_TYPES = {Kind.ENGINE_FAILED: "server_error", Kind.FULL: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    Kind.NO_PATH: "not_found_error",
    Kind.ENGINE_FAILED: "api_error",
    Kind.FULL: "rate_limit_error",
}


def openai_error(problem: Problem) -> JsonObject:
    kind = _OPENAI_TYPES.get(problem.kind, "invalid_request_error")
    return error_json(openai_message(problem), kind, problem.param, _CODES.get(problem.kind, str(problem.kind)))


def openai_message(problem: Problem) -> str:
    """The error message; a prompt that is too long gets OpenAI's wording, which clients recognise."""
    if problem.kind is not Kind.TOO_LONG or problem.tokens is None:
        return problem.message
    return (
        f"This model's maximum context length is {problem.limit} tokens. However, your messages resulted in "
        f"{problem.tokens} tokens."
    )


def anthropic_error(problem: Problem) -> JsonObject:
    message = problem.message
    if problem.kind is Kind.TOO_LONG and problem.tokens is not None:
        message = f"prompt is too long: {problem.tokens} tokens > {problem.limit} maximum"
    kind = _ANTHROPIC_TYPES.get(problem.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def stream_code(problem: Problem) -> str:
    """The error code of `response.failed`. Codex retries after any code except the last two."""
    if problem.is_retryable:
        return _CODES[problem.kind]
    return "context_length_exceeded" if problem.kind is Kind.TOO_LONG else "invalid_prompt"
