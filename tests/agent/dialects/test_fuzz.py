"""Any JSON from a client gives either a valid request or a `Problem`."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.server.dialects import DIALECTS, Dialect, Problem
from tests.agent.dialects.bodies import CLAUDE_CODE, CODEX, MINI, OPENCODE, QWEN_CODE
from tests.rows import examples

CHAT, RESPONSES, MESSAGES = DIALECTS
BODIES: list[tuple[Dialect, dict[str, Any]]] = [
    (CHAT, OPENCODE),
    (CHAT, QWEN_CODE),
    (CHAT, MINI),
    (RESPONSES, CODEX),
    (MESSAGES, CLAUDE_CODE),
]
WORDS = [
    "type",
    "text",
    "content",
    "role",
    "tool",
    "tools",
    "user",
    "assistant",
    "function",
    "name",
    "input",
    "id",
    "é",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(
        [*WORDS, "", "\ud800", "message", "reasoning", "thinking", "tool_use", "tool_result", "namespace"]
    )
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=6,
)


def value_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value of a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, entry in inner for place in value_paths(entry, (*path, name)))]


def with_value(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    body = copy.copy(body)
    body[place[0]] = with_value(body[place[0]], place[1:], value)
    return body


def check(dialect: Dialect, body: Any) -> None:
    """Check that a parsed request can be encoded and that a rejected one has an error response."""
    for path in dialect.paths:
        try:
            asked = dialect.asked(path, body)
        except Problem as problem:
            status, _, answer = dialect.problem(problem)
            assert status == 400
            json.dumps(answer, allow_nan=False, ensure_ascii=False).encode()
            continue
        assert asked.request.messages
        for message in asked.request.messages:
            (message.content + (message.reasoning or "") + (message.name or "")).encode()
        json.dumps([asked.request.tools, asked.request.params], allow_nan=False, ensure_ascii=False).encode()
        assert all(isinstance(call.arguments, str) for message in asked.request.messages for call in message.tool_calls)
        assert dialect.writer(asked, "turn").begin()


@pytest.mark.parametrize(("dialect", "body"), BODIES, ids=["opencode", "qwen", "mini", "codex", "claude"])
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_body_with_random_values_is_parsed_or_rejected(
    dialect: Dialect, body: dict[str, Any], data: st.DataObject
) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        body = with_value(body, data.draw(st.sampled_from(value_paths(body))), data.draw(VALUES))
        if not isinstance(body, dict):
            break
    check(dialect, body)


@settings(max_examples=examples(60), deadline=None)
@given(VALUES)
def test_random_body_is_parsed_or_rejected(body: Any) -> None:
    for dialect in DIALECTS:
        check(dialect, body)
