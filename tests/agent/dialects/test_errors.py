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
def test_status_is_retryable_only_if_a_retry_may_help(kind: Kind) -> None:
    problem = Problem(kind, "No more.", param="x")
    for dialect in DIALECTS:
        status, headers, body = dialect.problem(problem)
        again = kind in (Kind.ENGINE_FAILED, Kind.FULL)
        assert (status in RETRIED_BY_CLIENTS) == again
        assert headers["x-should-retry"] == ("true" if again else "false")
        assert body["error"]["message"] == "No more."
        assert body.get("type") == ("error" if dialect is MESSAGES else None)


def test_full_service_sends_retry_after() -> None:
    for dialect in DIALECTS:
        status, headers, body = dialect.problem(Problem(Kind.FULL, "Full.", retry_after_s=2.1))
        assert (status, headers["Retry-After"], body["error"]["type"]) == (429, "3", "rate_limit_error")
        assert "Retry-After" not in dialect.problem(Problem(Kind.ENGINE_FAILED, "No."))[1]


def test_responses_and_messages_get_400_for_permanent_problems() -> None:
    for kind in set(Kind) - {Kind.ENGINE_FAILED, Kind.FULL, Kind.NO_PATH}:
        for dialect in (RESPONSES, MESSAGES):
            assert dialect.problem(Problem(kind, "No."))[0] == 400


def test_chat_gets_404_for_a_finished_session_and_401_for_a_missing_one() -> None:
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
def test_session_refusals_become_problems(refusal: SessionRefusal, kind: Kind) -> None:
    problem = refusal_problem(refusal)
    assert (problem.kind, problem.message) == (kind, str(refusal))


def test_too_long_prompt_uses_the_messages_that_clients_know() -> None:
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


def test_dialect_of_an_unknown_path_follows_path_and_headers() -> None:
    assert dialect_of("/v1/responses", {}) is RESPONSES
    assert dialect_of("/v1/files", {}) is CHAT
    assert dialect_of("/v1/files", {"Anthropic-Version": "2023-06-01"}) is MESSAGES
    assert dialect_of("/v1/messages/batches", {}) is MESSAGES


def test_model_list_has_the_fields_of_both_apis() -> None:
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
