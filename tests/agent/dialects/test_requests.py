"""Requests of five agent command lines, parsed into one conversation format, and unsupported requests."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from slime.agent.messages import Message, ToolCall
from slime.agent.server.app import session_key
from slime.agent.server.dialects import DIALECTS, Dialect, Kind, Problem
from slime.agent.server.dialects.request_fields import replace_surrogates
from tests.agent.dialects.bodies import CLAUDE_CODE, CODEX, MINI, OPENCODE, QWEN_CODE, SHELL

CHAT, RESPONSES, MESSAGES = DIALECTS
ECHO = ToolCall("call_a", "bash", '{"command":"echo é > f"}')


def asked(dialect: Dialect, body: object, path: int = 0) -> Any:
    return dialect.asked(dialect.paths[path], body)


def test_parses_claude_code_requests() -> None:
    got = asked(MESSAGES, CLAUDE_CODE)
    assert got.request.messages == (
        Message("system", "x-anthropic-billing-header: none\nYou are Claude Code.\nBe brief."),
        Message("user", "Write the file."),
        Message("system", "Today is Monday."),
        Message(
            "assistant",
            "Writing.",
            reasoning="I write it.\n",
            tool_calls=(ToolCall("call_a", "Bash", '{"command": "echo é > f"}'), ToolCall("call_b", "Bash", "{}")),
            reference="turn_1",
        ),
        Message("tool", "Exit code 1", tool_call_id="call_a"),
        Message("tool", "one\ntwo", tool_call_id="call_b"),
        Message("user", "Go on."),
        Message("system", "A file changed."),
    )
    assert [tool["function"]["name"] for tool in got.request.tools] == ["Bash"]
    assert got.request.tools[0]["function"]["parameters"]["required"] == ["command"]
    assert (got.request.max_tokens, got.stream, got.model, got.count_only) == (32000, True, "slime-actor", False)
    assert got.notes == ("the tool 'web_search_20250305' is run by Anthropic's service and is ignored here",)


def test_cache_control_and_text_form_do_not_change_the_request() -> None:
    moved = copy.deepcopy(CLAUDE_CODE)
    moved["messages"][0]["content"] = [{"type": "text", "text": "Write the file.", "cache_control": {"type": "e"}}]
    del moved["messages"][3]["content"][1]["cache_control"]
    moved["messages"][1]["content"] = "Today is Monday."
    assert asked(MESSAGES, moved).request == asked(MESSAGES, CLAUDE_CODE).request


def test_count_request_needs_no_max_tokens() -> None:
    body = {name: CLAUDE_CODE[name] for name in ("model", "messages", "tools", "system")}
    got = asked(MESSAGES, body, path=1)
    assert got.count_only
    assert not got.stream
    assert MESSAGES.counted(17) == {"input_tokens": 17}
    with pytest.raises(Problem, match="max_tokens: must be given"):
        asked(MESSAGES, body)


def test_parses_codex_requests() -> None:
    got = asked(RESPONSES, CODEX)
    assert got.request.messages == (
        Message("system", "You are Codex."),
        Message("system", "<permissions>"),
        Message("user", "Write it."),
        Message(
            "assistant",
            "Writing.",
            reasoning="I write it.\n",
            tool_calls=(
                ToolCall("call_a", "exec_command", '{"cmd": "echo \\u00e9 > f"}'),
                ToolCall("call_b", "apply_patch", '{"input": "*** Begin Patch"}'),
                ToolCall("call_c", "mcp__docs__find", "{}"),
            ),
            reference="turn_1",
        ),
        Message("tool", "Exit code: 0", tool_call_id="call_a"),
        Message("tool", "Success", tool_call_id="call_b"),
        Message("tool", "found", tool_call_id="call_c"),
    )
    names = [tool["function"]["name"] for tool in got.request.tools]
    assert names == ["exec_command", "mcp__docs__find", "apply_patch"]
    assert got.request.tools[2]["function"]["parameters"]["required"] == ["input"]
    assert got.notes == ("the tool 'web_search' is run by OpenAI's service and is ignored here",)
    assert (got.stream, got.request.max_tokens, got.request.parallel_tool_calls) == (True, None, True)


def test_responses_turn_is_recognized_by_any_of_its_ids() -> None:
    for kept in range(3, 6):
        body = {**CODEX, "input": [CODEX["input"][2], CODEX["input"][kept]]}
        if kept == 3:
            body["input"][1] = {"type": "reasoning", "summary": [], "encrypted_content": "turn_1"}
        assert asked(RESPONSES, body).request.messages[1].reference == "turn_1"


def test_items_of_two_turns_become_two_messages() -> None:
    texts = [{"role": "assistant", "id": f"msg_turn_{i}.0", "content": f"say {i}"} for i in (1, 2)]
    got = asked(RESPONSES, {"model": "m", "input": [{"role": "user", "content": "go"}, *texts]})
    assert [(m.content, m.reference) for m in got.request.messages[1:]] == [("say 1", "turn_1"), ("say 2", "turn_2")]


@pytest.mark.parametrize("body", [OPENCODE, QWEN_CODE], ids=["opencode", "qwen"])
def test_parses_opencode_and_qwen_code_requests(body: dict[str, Any]) -> None:
    got = asked(CHAT, body)
    assistant = got.request.messages[2]
    assert assistant.tool_calls == (ECHO, ToolCall("call_b", "bash", "{}"))
    assert assistant.reasoning == "I write it.\n"
    assert assistant.content == ("Writing." if body is OPENCODE else "")
    assert got.request.messages[1] == Message("user", "Write it.")
    assert got.request.messages[3:] == (
        Message("tool", "ok", tool_call_id="call_a"),
        Message("tool", "ok too", tool_call_id="call_b"),
    )
    assert got.request.max_tokens == 4096
    assert got.include_usage
    assert got.stream
    assert got.request.params == ({} if body is OPENCODE else {"temperature": 0.7, "top_p": 0.9})


def test_parses_mini_swe_agent_requests() -> None:
    got = asked(CHAT, MINI)
    assert got.request.messages[2] == Message("assistant", reasoning="I write it.\n", tool_calls=(ECHO,))
    assert not got.stream
    assert got.request.max_tokens is None


def test_chat_turn_split_into_two_messages_is_merged() -> None:
    body = copy.deepcopy(OPENCODE)
    whole = body["messages"].pop(2)
    halves = [{**whole, "content": None, "reasoning_content": None}, {"role": "assistant", "content": "Writing."}]
    body["messages"][2:2] = halves
    got = asked(CHAT, body).request.messages
    assert got[2] == Message("assistant", "Writing.", tool_calls=(ECHO, ToolCall("call_b", "bash", "{}")))
    assert [message.role for message in got] == ["system", "user", "assistant", "tool", "tool"]


def test_sampling_parameters_are_renamed_for_the_engine() -> None:
    body = {**MINI, "top_k": 20, "seed": 2**60 + 1, "stop": "END", "min_tokens": 3, "frequency_penalty": 1}
    assert asked(CHAT, body).request.params == {
        "frequency_penalty": 1.0,
        "top_k": 20,
        "sampling_seed": 2**60 + 1,
        "min_new_tokens": 3,
        "stop": ["END"],
    }
    body = {**CLAUDE_CODE, "temperature": 1, "stop_sequences": ["a", "b"]}
    assert asked(MESSAGES, body).request.params == {"temperature": 1.0, "stop": ["a", "b"]}


@pytest.mark.parametrize(
    ("dialect", "body", "choice", "expected"),
    [
        (CHAT, OPENCODE, "required", "required"),
        (CHAT, OPENCODE, {"type": "function", "function": {"name": "bash"}}, "bash"),
        (RESPONSES, CODEX, "none", "none"),
        (RESPONSES, CODEX, {"type": "custom", "name": "apply_patch"}, "apply_patch"),
        (MESSAGES, CLAUDE_CODE, {"type": "any", "disable_parallel_tool_use": True}, "required"),
        (MESSAGES, CLAUDE_CODE, {"type": "tool", "name": "Bash"}, "Bash"),
    ],
)
def test_tool_choice_is_parsed_and_noted_as_not_forced(
    dialect: Dialect, body: dict[str, Any], choice: Any, expected: str
) -> None:
    whole = asked(dialect, {**body, "tool_choice": choice})
    assert whole.request.tool_choice == expected
    assert whole.request.parallel_tool_calls == ("disable_parallel_tool_use" not in choice)
    assert any("is not forced on the model" in note for note in whole.notes) == (expected != "none")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("dialect", "body", "change", "sentence"),
    [
        (CHAT, MINI, {"n": 2}, "n: only one choice a request is sampled here: ask again for another one"),
        (CHAT, MINI, {"top_logprobs": 3}, "top_logprobs: only the log-probs of the tokens that were sampled are known"),
        (CHAT, MINI, {"response_format": {"type": "json_object"}}, "response_format: answers are sampled freely here"),
        (CHAT, MINI, {"functions": [{}]}, "functions: was replaced by tools"),
        (CHAT, MINI, {"guided_json": {"a": 1}}, "guided_json: this field is not known here"),
        (CHAT, MINI, {"temperature": "hot"}, "temperature: must be a number, not a string"),
        (CHAT, MINI, {"temperature": float("nan")}, "temperature: must be a finite number"),
        (CHAT, MINI, {"max_tokens": 0}, "max_tokens: must be a whole number of at least 1"),
        (CHAT, MINI, {"stream": "yes"}, "stream: must be true or false, not a string"),
        (CHAT, OPENCODE, {"stream_options": {"include_usage": 1}}, "^stream_options.include_usage: must be true or"),
        (
            CHAT,
            MINI,
            {"tool_choice": {"type": "function", "function": {}}},
            "^tool_choice.function.name: must be a str",
        ),
        (CHAT, MINI, {"tools": [{"function": {"name": ""}}]}, r"^tools\[0\].function.name: must not be empty"),
        (CHAT, MINI, {"messages": []}, "messages: must have at least one message"),
        (CHAT, MINI, {"messages": [{"role": "user", "content": [IMAGE_URL]}]}, "this model reads text only"),
        (CHAT, MINI, {"messages": [{"role": "robot"}]}, r"messages\[0\].role: must be system"),
        (CHAT, MINI, {"model": None}, "model: must be a string, not nothing"),
        (CHAT, MINI, {"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "there is no tool 'nope'"),
        (RESPONSES, CODEX, {"previous_response_id": "resp_1"}, "previous_response_id: nothing is kept on this side"),
        (RESPONSES, CODEX, {"input": [{"type": "item_reference", "id": "x"}]}, "nothing is kept on this side"),
        (RESPONSES, CODEX, {"tools": [{"type": "local_shell"}]}, r"tools\[0\].type: only function, custom and name"),
        (RESPONSES, CODEX, {"text": {"format": {"type": "json_schema"}}}, "text.format: answers are sampled freely"),
        (RESPONSES, CODEX, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text only"),
        (RESPONSES, CODEX, {"background": True}, "background: answers come with their request"),
        (MESSAGES, CLAUDE_CODE, {"messages": [{"role": "user", "content": [IMAGE]}]}, "this model reads text only"),
        (MESSAGES, CLAUDE_CODE, {"tools": [{"name": "a", "input_schema": 1}]}, r"^tools\[0\].input_schema: must be an"),
        (MESSAGES, CLAUDE_CODE, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "declare it as one"),
        (MESSAGES, CLAUDE_CODE, {"messages": [{"role": "assistant", "content": "So"}]}, "must end with a message of"),
        (MESSAGES, CLAUDE_CODE, {"mcp_servers": [{"url": "x"}]}, "mcp_servers: no tools are run on this side"),
        (MESSAGES, CLAUDE_CODE, {"output_config": {"format": {"type": "json_schema"}}}, "answers are sampled freely"),
    ],
)
def test_rejects_unsupported_fields_and_values(
    dialect: Dialect, body: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Problem, match=sentence) as caught:
        asked(dialect, {**body, **change})
    assert caught.value.kind is Kind.BAD_BODY
    status, headers, answer = dialect.problem(caught.value)
    assert (status, headers) == (400, {"x-should-retry": "false"})
    assert answer["error"]["message"] == caught.value.message


def test_image_in_a_tool_result_is_replaced_by_a_note() -> None:
    left_out = "[image left out: this model reads text only]"
    body = copy.deepcopy(CLAUDE_CODE)
    body["messages"][3]["content"][0]["content"] = [IMAGE, {"type": "text", "text": "done"}]
    assert asked(MESSAGES, body).request.messages[4].content == f"{left_out}\ndone"


def test_empty_tool_error_gets_an_error_message() -> None:
    body = copy.deepcopy(CLAUDE_CODE)
    body["messages"][3]["content"][0]["content"] = ""
    assert asked(MESSAGES, body).request.messages[4].content == "Error: the tool failed and said nothing."


def test_unknown_fields_with_empty_values_are_ignored() -> None:
    for dialect, body in ((CHAT, MINI), (RESPONSES, CODEX), (MESSAGES, CLAUDE_CODE)):
        assert asked(dialect, {**body, "new_field": None, "newer": {}, "newest": False}) == asked(dialect, body)


def test_lone_surrogate_becomes_a_replacement_character() -> None:
    assert replace_surrogates("a\ud83d b") == "a\N{REPLACEMENT CHARACTER} b"
    assert replace_surrogates("a\udc00") == "a\N{REPLACEMENT CHARACTER}"
    assert replace_surrogates("\ud83d\ude00") == "\N{GRINNING FACE}"
    got = asked(CHAT, {**MINI, "messages": [{"role": "user", "content": json.loads('"x\\ud800y"')}]})
    assert got.request.messages[0].content == "x\N{REPLACEMENT CHARACTER}y"


def test_rejects_a_schema_that_is_nested_too_deeply() -> None:
    schema: dict[str, Any] = dict(SHELL)
    for _ in range(400):
        schema = {"type": "object", "properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "t", "parameters": schema}}
    with pytest.raises(Problem, match="is nested more than 64 deep"):
        asked(CHAT, {**MINI, "tools": [tool]})


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"Authorization": "Bearer abc", "X-Api-Key": "def"}, "abc"),
        ({"authorization": "bearer  abc "}, "abc"),
        ({"Authorization": "Basic abc", "X-Api-Key": "def"}, "def"),
        ({"Authorization": "Bearer ", "x-slime-session": "ghi", "x-session-id": "jkl"}, "ghi"),
        ({"X-Session-Id": "jkl"}, "jkl"),
        ({"session-id": "client's own"}, None),
    ],
)
def test_session_key_is_read_from_the_headers(headers: dict[str, str], key: str | None) -> None:
    assert session_key(headers) == key
