"""OpenAI-compatible routes: semantics, error format, API keys and request limits."""

from __future__ import annotations

import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from slime.engine.embedded.errors import BadRequest
from slime.engine.embedded.http.openai import forced_call, render_chat
from slime.engine.embedded.http.requests import RequestField
from tests.engine.conftest import EngineProcess
from tests.migration.scripted import make_scripted_model
from tests.tiny_models import make_tokenizer

TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}"
    "{% if c.function.arguments is mapping %}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}"
    "{% else %} raw {{ c.function.arguments }}{% endif %}){% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ style or '' }}"
)
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def text(**body: Any) -> str:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    fields = RequestField({"messages": [USER], **body})
    prompt = render_chat(tokenizer, fields)
    forced_call(fields)
    return prompt


def tool_call_messages(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


def test_chat_template_renders_messages_parts_and_tools() -> None:
    assert text() == "<user>hi<assistant>"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text(messages=[{"role": "user", "content": parts}]) == "<user>ab<assistant>"
    assert text(tools=[TOOL]) == "[add]<user>hi<assistant>"
    assert text(tools=[TOOL], tool_choice="none") == "<user>hi<assistant>"
    assert text(chat_template_kwargs={"style": "!"}) == "<user>hi<assistant>!"


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"a": 1, "b": "x"}', "(add a=1 b=x)"),
        ({"a": 1}, "(add a=1)"),
        ("{broken", "(add raw {broken)"),
        ("[1]", "(add raw [1])"),
    ],
)
def test_json_tool_call_arguments_reach_the_template_as_objects(arguments: Any, rendered: str) -> None:
    assert text(messages=tool_call_messages(arguments)) == f"<user>hi<assistant>{rendered}<assistant>"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"conversation": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"return_dict": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs"),
        ({"chat_template": "{{ 7 * 7 }}"}, "chat_template"),
        ({"tools": {}}, "tools"),
        ({"tools": ["add"]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": "add"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": ["add"]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": tool_call_messages(7)}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ],
)
def test_rejects_invalid_template_tool_and_message_fields(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        text(**body)
    assert refused.value.param == param


def test_required_or_named_tool_choice_forces_a_call() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    given = {"messages": [USER], "tools": [TOOL]}
    assert forced_call(RequestField({**given, "tool_choice": "required"})) == (True, None)
    assert forced_call(RequestField({**given, "tool_choice": named})) == (True, "add")
    for choice in (None, "auto", "none"):
        assert forced_call(RequestField({**given, "tool_choice": choice})) == (False, None)


PIECES = ["<think>", "hm", "</think>", "so ", "<tool_call>", '{"name": "add", ', '"arguments": {"a": ', '"x', 'y"}}', "</tool_call>"]  # fmt: skip
FORCED = {" ": {'{"a": 7}}': 1.0}, '{"a": 7}}': {"</tool_call>": 1.0}, '"': {'add", "arguments": {}}': 1.0}}
SCRIPT = {before: {after: 1.0} for before, after in itertools.pairwise(["\n", *PIECES])} | FORCED
ARGUMENTS = '{"a": "xy"}'


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine whose model writes reasoning, text and a tool call."""
    folder = tmp_path_factory.mktemp("caller")
    made = make_scripted_model(folder / "model", SCRIPT)
    flags = ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")
    running = EngineProcess(made.folder, folder / "log", *flags)
    yield running
    assert running.stop() == 0


CHAT: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "max_tokens": 16}


def chat_choice(engine: EngineProcess, **body: Any) -> dict[str, Any]:
    status, answer = engine.post("/v1/chat/completions", {**CHAT, **body})
    assert status == 200, answer
    [choice] = answer["choices"]
    for call in choice["message"].get("tool_calls") or ():
        assert re.fullmatch("call_[0-9a-f]{24}", call.pop("id"))
    return choice


def call(arguments: str) -> dict[str, Any]:
    return {"index": 0, "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_parsers_separate_reasoning_text_and_tool_calls(caller: EngineProcess) -> None:
    choice = chat_choice(caller)
    assert choice["message"] == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [call(ARGUMENTS)],
    }
    assert choice["finish_reason"] == "tool_calls"
    made = "".join(PIECES[4:])
    plain = chat_choice(caller, tool_choice="none")
    assert plain["message"] == {"role": "assistant", "content": f"so {made}", "reasoning_content": "hm"}
    assert plain["finish_reason"] == "stop"
    whole = chat_choice(caller, tools=None, separate_reasoning=False)
    assert whole["message"] == {"role": "assistant", "content": f"<think>hm</think>so {made}"}


def test_truncated_tool_call_is_returned_as_text(caller: EngineProcess) -> None:
    choice = chat_choice(caller, max_tokens=8)
    assert choice["message"] == {
        "role": "assistant",
        "content": "so " + "".join(PIECES[4:8]),
        "reasoning_content": "hm",
    }
    assert choice["finish_reason"] == "length"


def test_forced_tool_choice_needs_a_parser_and_returns_a_call(caller: EngineProcess, engine: EngineProcess) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for choice, arguments in (("required", "{}"), (named, '{"a": 7}')):
        forced = chat_choice(caller, tool_choice=choice)
        assert forced["message"] == {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
        assert forced["finish_reason"] == "tool_calls"
        status, answer = engine.post("/v1/chat/completions", {**CHAT, "tool_choice": choice})
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
        assert "--tool-call-parser" in answer["error"]["message"]


def test_openai_client_streams_reasoning_text_and_tool_calls(caller: EngineProcess) -> None:
    client = openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0)
    chunks = list(client.chat.completions.create(**CHAT, model="any", stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == "so"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    calls = [made.function for delta in deltas for made in delta.tool_calls or ()]
    assert [made.name for made in calls] == ["add"] + [None] * (len(calls) - 1)
    assert "".join(made.arguments or "" for made in calls) == ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**CHAT, model="any") as stream:
        message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", "so")
    assert [made.function.arguments for made in message.tool_calls or ()] == [ARGUMENTS]


def test_prompt_may_be_a_list_of_texts_or_token_ids(engine: EngineProcess) -> None:
    limits = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    words = ["what is", "the answer"]
    ids = [make_tokenizer().encode(word) for word in words]
    one = [engine.post("/v1/completions", {"prompt": word, **limits})[1]["choices"][0]["text"] for word in words]
    for prompt in (words, ids):
        status, answer = engine.post("/v1/completions", {"prompt": prompt, "n": 2, **limits})
        assert status == 200
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in answer["choices"]] == [one[0], one[0], one[1], one[1]]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert engine.post("/v1/completions", {"prompt": ids[0], **limits})[1]["choices"][0]["text"] == one[0]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("completions", {"prompt": 7}, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": "x"}, "max_tokens"),
        ("completions", {"prompt": "a", "logprobs": True}, "logprobs"),
        ("chat/completions", {"messages": [USER], "logprobs": 3}, "logprobs"),
        ("chat/completions", {"messages": [USER], "max_completion_tokens": -1}, "max_completion_tokens"),
        ("chat/completions", {"messages": [USER], "temperature": "hot"}, "temperature"),
        ("chat/completions", {"messages": [USER], "stream": "yes"}, "stream"),
        ("chat/completions", {"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of"),
        ("completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 4}, None),
    ],
)
def test_errors_have_the_openai_format(
    engine: EngineProcess, route: str, body: dict[str, Any], param: str | None
) -> None:
    status, answer = engine.post(f"/v1/{route}", body)
    assert status == 400
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)


def test_fields_without_effect_are_ignored(engine: EngineProcess) -> None:
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    plain = engine.post("/v1/completions", body)[1]["choices"][0]["text"]
    asked = {"user": "me", "best_of": 1, "echo": False, "response_format": {"type": "text"}, "store": True}
    status, answer = engine.post("/v1/completions", {**body, **asked})
    assert (status, answer["choices"][0]["text"]) == (200, plain)


def test_rejects_a_prompt_far_beyond_the_context(engine: EngineProcess) -> None:
    status, answer = engine.post("/v1/completions", {"prompt": "a" * 1_000_000})
    assert status == 400
    assert "1000000 characters" in answer["error"]["message"]


@pytest.fixture(scope="module")
def guarded(qwen3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    limits = ("--max-queued-requests", "4", "--max-samples-per-request", "3", "--max-body-mb", "1")
    running = EngineProcess(qwen3_folder, tmp_path_factory.mktemp("guarded") / "log", "--api-key", "sésame", *limits)
    yield running
    assert running.stop() == 0


def ask(engine: EngineProcess, path: str, body: Any = None, key: bytes | None = "sésame".encode()) -> tuple[int, Any]:
    request = urllib.request.Request(engine.url + path, data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", (b"Bearer " + key).decode("latin-1"))
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def test_routes_require_the_api_key_except_health(guarded: EngineProcess) -> None:
    for path in ("/server_info", "/v1/models", "/nowhere"):
        for key in (None, b"", b"wrong", b"s\xe9same", b"\xff"):
            status, answer = ask(guarded, path, key=key)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
    assert ask(guarded, "/health", key=None) == (200, {"status": "ok"})
    assert ask(guarded, "/health_generate", key=None) == (200, {"status": "ok"})
    status, info = ask(guarded, "/server_info")
    assert status == 200
    assert "sésame" not in json.dumps(info, ensure_ascii=False)


def test_body_size_samples_and_queue_are_limited(guarded: EngineProcess) -> None:
    status, answer = ask(guarded, "/generate", {"text": "a" * (1 << 20)})
    assert (status, answer["error"]["code"]) == (413, 413)
    long = {"max_new_tokens": 400, "ignore_eos": True}
    status, answer = ask(guarded, "/generate", {"input_ids": [5], "sampling_params": {"n": 4}})
    assert (status, answer["error"]["param"]) == (400, "n")
    status, answer = ask(guarded, "/v1/completions", {"prompt": ["a", "b"], "n": 2})
    assert (status, answer["error"]["param"]) == (400, "n")
    assert ask(guarded, "/pause_generation", {"mode": "in_place"})[0] == 200
    asked = guarded.in_background(
        lambda: ask(guarded, "/generate", {"input_ids": [5], "sampling_params": {**long, "n": 3}})
    )
    while ask(guarded, "/server_info")[1]["num_waiting_reqs"] < 3:
        pass
    status, answer = ask(guarded, "/v1/completions", {"prompt": "a", "n": 2})
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    ask(guarded, "/continue_generation", {})
    assert asked.result(240)[0] == 200
    assert ask(guarded, "/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 2})[0] == 200


def test_completion_log_probs_have_the_openai_format(engine: EngineProcess) -> None:
    """Completions have columns of tokens, as in OpenAI's client types; a chat has a list of objects."""
    client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "m", "prompt": [11, 12, 13], "max_tokens": 6, "temperature": 0}
    params = {"max_new_tokens": 6, "temperature": 0}
    told = engine.generate(input_ids=[11, 12, 13], sampling_params=params, return_logprob=True, top_logprobs_num=2)
    sampled = [(entry[1], entry[0]) for entry in told["meta_info"]["output_token_logprobs"]]
    words = [make_tokenizer().decode([token]) for token, _ in sampled]
    for top in (0, 2):
        found = client.completions.create(**asked, logprobs=top).choices[0].logprobs
        pieces = [one.choices[0].logprobs for one in client.completions.create(**asked, logprobs=top, stream=True)]
        assert found is not None
        assert set(found.to_dict()) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert found.tokens == words
        assert found.token_logprobs == pytest.approx([logprob for _, logprob in sampled], abs=1e-5)
        assert found.text_offset == [len("".join(words[:at])) for at in range(len(words))]
        for name in ("tokens", "text_offset"):
            assert [one for piece in pieces for one in getattr(piece, name)] == getattr(found, name)
        if not top:
            assert found.top_logprobs is None
            continue
        assert found.top_logprobs is not None
        for word, logprob, best in zip(words, found.token_logprobs or [], found.top_logprobs, strict=True):
            assert best[word] == logprob == max(best.values())
            assert len(best) <= top
    assert client.completions.create(**asked).choices[0].logprobs is None
    said = client.chat.completions.create(model="m", messages=[USER], max_tokens=2, logprobs=True, top_logprobs=1)  # type: ignore[list-item]
    assert said.choices[0].logprobs is not None
    assert len(said.choices[0].logprobs.content or []) == 2
