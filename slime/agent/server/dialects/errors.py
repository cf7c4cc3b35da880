"""Error responses of each dialect, with HTTP statuses that make its clients retry or stop as intended.

Invariant: a problem that a retry cannot solve is never 408, 409, 429 or 5xx and carries `x-should-retry: false`, so
that an agent stops at once and does not spend minutes of its sandbox on retries. The reaction of clients to each status
was tested with Claude Code and Codex, and read in the sources of mini-swe-agent and Qwen Code:

- Claude Code (messages) and Codex (responses) retry after 401, Claude Code without a stream after 404: always 400.
- mini-swe-agent (chat) retries after 400, ten times, but not after 401, 404 or a prompt that is too long, nor do
  Qwen Code and, as it seems, opencode: a session that is over is "not found" there.
"""

from __future__ import annotations

import math

from slime.agent.server.dialects.dialect import Kind, Problem
from slime.agent.session.limits import LimitReached, PromptExceedsContext, SessionClosed, SessionRefusal
from slime.storage.json_types import JsonObject

ErrorResponse = tuple[int, dict[str, str], JsonObject]

_CHAT_STATUS = {
    Kind.NO_SESSION: 401,
    Kind.CLOSED: 404,
    Kind.TURN_LIMIT: 404,
    Kind.TOKEN_LIMIT: 404,
    Kind.DEADLINE: 404,
    Kind.REFUSED: 404,
    Kind.UNKNOWN_MODEL: 404,
    Kind.NO_PATH: 404,
    Kind.SHUTTING_DOWN: 404,
    Kind.ENGINE_FAILED: 500,
    Kind.FULL: 429,
}
_OTHER_STATUS = {Kind.NO_PATH: 404, Kind.ENGINE_FAILED: 500, Kind.FULL: 429}
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


def chat_problem(problem: Problem) -> ErrorResponse:
    return _CHAT_STATUS.get(problem.kind, 400), _headers(problem), {"error": openai_error(problem)}


def responses_problem(problem: Problem) -> ErrorResponse:
    return _OTHER_STATUS.get(problem.kind, 400), _headers(problem), {"error": openai_error(problem)}


def messages_problem(problem: Problem) -> ErrorResponse:
    return _OTHER_STATUS.get(problem.kind, 400), _headers(problem), anthropic_error(problem)


def openai_error(problem: Problem) -> JsonObject:
    kind = _OPENAI_TYPES.get(problem.kind, "invalid_request_error")
    code = _CODES.get(problem.kind, str(problem.kind))
    return {"message": openai_message(problem), "type": kind, "param": problem.param, "code": code}


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


def _headers(problem: Problem) -> dict[str, str]:
    headers = {"x-should-retry": "true" if problem.is_retryable else "false"}
    if problem.kind is Kind.FULL:
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    return headers
