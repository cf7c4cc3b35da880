"""Error responses to each problem, by dialect: shape, status and message."""

from __future__ import annotations

import pytest

from slime.agent.server.dialects import DIALECTS, Kind, Problem, dialect_of, model_body, models_body, refusal_problem
from slime.agent.session.limits import (
    ContinuationRefused,
    LimitReached,
    PromptExceedsContext,
    SessionClosed,
    SessionRefusal,
)

CHAT, RESPONSES, MESSAGES = DIALECTS
RETRIED_BY_CLIENTS = {408, 409, 425, 429, 500, 502, 503, 504, 529}


@pytest.mark.parametrize("kind", list(Kind))
def test_each_problem_ends_a_client_at_once_unless_asking_again_may_help(kind: Kind) -> None:
    problem = Problem(kind, "No more.", param="x")
    for dialect in DIALECTS:
        status, headers, body = dialect.problem(problem)
        again = kind in (Kind.ENGINE_FAILED, Kind.FULL)
        assert (status in RETRIED_BY_CLIENTS) == again
        assert headers["x-should-retry"] == ("true" if again else "false")
        assert body["error"]["message"] == "No more."
        assert body.get("type") == ("error" if dialect is MESSAGES else None)


def test_who_comes_to_a_full_service_is_told_when_to_come_back() -> None:
    for dialect in DIALECTS:
        status, headers, body = dialect.problem(Problem(Kind.FULL, "Full.", retry_after_s=2.1))
        assert (status, headers["Retry-After"], body["error"]["type"]) == (429, "3", "rate_limit_error")
        assert "Retry-After" not in dialect.problem(Problem(Kind.ENGINE_FAILED, "No."))[1]


def test_claude_code_and_codex_get_400_for_what_they_would_ask_again_after() -> None:
    for kind in set(Kind) - {Kind.ENGINE_FAILED, Kind.FULL, Kind.NO_PATH}:
        for dialect in (RESPONSES, MESSAGES):
            assert dialect.problem(Problem(kind, "No."))[0] == 400


def test_mini_never_gets_400_for_a_session_that_is_over() -> None:
    for kind in (Kind.CLOSED, Kind.TURN_LIMIT, Kind.TOKEN_LIMIT, Kind.DEADLINE, Kind.REFUSED, Kind.SHUTTING_DOWN):
        assert CHAT.problem(Problem(kind, "No."))[0] == 404
    assert CHAT.problem(Problem(Kind.NO_SESSION, "No."))[0] == 401


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (SessionClosed("over"), Kind.CLOSED),
        (ContinuationRefused("no"), Kind.REFUSED),
        (LimitReached("turns", "x"), Kind.TURN_LIMIT),
        (LimitReached("tokens", "x"), Kind.TOKEN_LIMIT),
        (LimitReached("deadline", "x"), Kind.DEADLINE),
        (LimitReached("context", "x"), Kind.TOO_LONG),
    ],
)
def test_refusals_of_a_session_are_problems(refusal: SessionRefusal, kind: Kind) -> None:
    problem = refusal_problem(refusal)
    assert (problem.kind, problem.message) == (kind, str(refusal))


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know() -> None:
    problem = refusal_problem(PromptExceedsContext(40_000, 32_767))
    assert MESSAGES.problem(problem)[2]["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 40000 tokens > 32767 maximum",
    }
    for dialect in (CHAT, RESPONSES):
        status, _, body = dialect.problem(problem)
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded"
        assert body["error"]["message"] == (
            "This model's maximum context length is 32767 tokens. However, your messages resulted in 40000 tokens."
        )


def test_a_path_that_nobody_has_is_answered_in_the_clients_words() -> None:
    assert dialect_of("/v1/responses", {}) is RESPONSES
    assert dialect_of("/v1/files", {}) is CHAT
    assert dialect_of("/v1/files", {"Anthropic-Version": "2023-06-01"}) is MESSAGES
    assert dialect_of("/v1/messages/batches", {}) is MESSAGES


def test_models_are_listed_in_the_words_of_both_apis() -> None:
    assert models_body(["a", "b"]) == {
        "object": "list",
        "data": [model_body("a"), model_body("b")],
        "has_more": False,
        "first_id": "a",
        "last_id": "b",
    }
    assert (model_body("a")["object"], model_body("a")["type"], model_body("a")["display_name"]) == (
        "model",
        "model",
        "a",
    )
    assert models_body([])["first_id"] is None
