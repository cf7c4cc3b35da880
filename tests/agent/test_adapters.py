"""Upstream's adapters in their usual setup: an application in a thread, sessions from another event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter
from slime.agent.adapters.common import (
    TurnRecord,
    call_sglang_generate,
    flatten_content,
    manager_finish_reason,
    sid_from_body,
    tool_call_dict,
)
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.data.sample import Sample
from slime.engine.http.codec import parse_json
from slime.errors import UserError
from tests.agent.scripted_engine import ScriptedEngine, Turn, log_prob

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
DEFAULTS = {"temperature": 0.8, "max_new_tokens": 200}
ASK = {"role": "user", "content": "what is 12+34?"}
SAID = (
    'Both.<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 34}}</tool_call>',
    "the answer is 46",
)


@pytest.fixture
def spoken(agent_tokenizer: Any) -> list[Turn]:
    return [Turn.of(agent_tokenizer, text, seed=seed) for seed, text in enumerate(SAID)]


@pytest.fixture
def serve(play: Any, agent_tokenizer: Any) -> Iterator[Any]:
    """`serve(adapter class, turns)`: (engine, adapter, handle)."""
    handles: list[AppHandle] = []

    def make(kind: type[BaseAdapter], turns: list[Turn], **options: Any) -> tuple[ScriptedEngine, Any, AppHandle]:
        engine, url = play(turns)
        adapter = kind(tokenizer=agent_tokenizer, sglang_url=url, **options)
        handles.append(run_app_in_thread(adapter.app, host="127.0.0.1", port=0))
        return engine, adapter, handles[-1]

    yield make
    for handle in handles:
        handle.stop()


def sample() -> Sample:
    return Sample(prompt="add", index=5, group_index=2, metadata={"task": "sum"})


def chat(handle: AppHandle, sid: str, stream: bool) -> str:
    """Run a conversation until the model makes no call; return the last answer."""
    client = openai.OpenAI(base_url=f"{handle.url}/v1", api_key=sid, max_retries=4)
    messages: list[Any] = [ASK]
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    while True:
        if stream:
            with client.chat.completions.stream(model="any", messages=messages, tools=tools, temperature=2) as said:
                message: Any = said.get_final_completion().choices[0].message
        else:
            answer = client.chat.completions.create(model="any", messages=messages, tools=tools, temperature=2)
            message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "46"} for call in message.tool_calls]


def messages_api(handle: AppHandle, sid: str, stream: bool) -> str:
    client = anthropic.Anthropic(base_url=handle.url, auth_token=sid, api_key=None, max_retries=4)
    asking: dict[str, Any] = {"model": "any", "max_tokens": 150, "messages": [ASK]}
    asking["tools"] = [{"name": "add", "input_schema": SCHEMA}]
    while True:
        if stream:
            with client.messages.stream(**asking) as said:
                message: Any = said.get_final_message()
        else:
            message = client.messages.create(**asking)
        asking["messages"].append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return message.content[-1].text
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "46"} for call in calls]
        asking["messages"].append({"role": "user", "content": results})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("kind", "talk"), [(OpenAIAdapter, chat), (AnthropicAdapter, messages_api)])
def test_a_session_becomes_one_sample_of_the_sampled_tokens(
    serve: Any, spoken: list[Turn], kind: Any, talk: Any, stream: bool
) -> None:
    engine, adapter, handle = serve(kind, spoken)
    adapter.open_session("agent-1", sampling_defaults=DEFAULTS, max_context_tokens=2000)
    assert talk(handle, "agent-1", stream) == "the answer is 46"
    assert adapter.manager.turn_count("agent-1") == 2
    finishing = adapter.finish_session("agent-1", base_sample=sample(), reward=0.5, extra_metadata={"passed": True})
    [made] = asyncio.run(finishing)
    mask = np.array(made.loss_mask, dtype=bool)
    trained = np.array(made.tokens[-made.response_length :])[mask].tolist()
    assert trained == [*spoken[0].ids, *spoken[1].ids]
    expected = np.float32([log_prob(token) for token in trained])
    np.testing.assert_array_equal(np.float32(made.rollout_log_probs)[mask], expected)
    assert (made.reward, made.index, made.rollout_id, made.status) == (0.5, 5, 5, Sample.Status.COMPLETED)
    assert made.metadata["task"] == "sum"
    assert made.metadata["passed"] is True
    assert (made.metadata["use_tool"], made.metadata["truncated"], made.metadata["ill_formed"]) == (True, False, False)
    assert made.metadata["session"]["retokenised_tokens"] == 0
    assert [asked.params["temperature"] for asked in engine.requests] == [0.8, 0.8]
    assert {asked.headers["X-SMG-Routing-Key"] for asked in engine.requests} == {"agent-1"}
    assert asyncio.run(adapter.finish_session("agent-1", base_sample=sample())) == []
    assert (adapter.store, dict(adapter.inflight), list(adapter.closed)) == ({}, {}, ["agent-1"])


def post(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


BODY = {"model": "m", "max_tokens": 50, "messages": [ASK]}


@pytest.mark.parametrize(
    ("kind", "headers", "more", "sid"),
    [
        (OpenAIAdapter, {"Authorization": "Bearer s"}, {"user": "t"}, "s"),
        (OpenAIAdapter, {}, {"metadata": {"session_id": "s"}, "user": "t"}, "s"),
        (OpenAIAdapter, {}, {"user": "s"}, "s"),
        (OpenAIAdapter, {}, {}, "default"),
        (AnthropicAdapter, {"Authorization": "Bearer s", "X-Api-Key": "t"}, {}, "s"),
        (AnthropicAdapter, {"X-Api-Key": "s"}, {}, "s"),
        (AnthropicAdapter, {}, {}, "default"),
    ],
)
def test_session_id_comes_from_the_headers_or_the_body(
    serve: Any, spoken: list[Turn], kind: Any, headers: Any, more: Any, sid: str
) -> None:
    _, adapter, handle = serve(kind, spoken[1:])
    path = "/v1/messages" if kind is AnthropicAdapter else "/v1/chat/completions"
    refused, body = post(handle.url + path, {**BODY, **more}, **headers)
    assert refused == (400 if kind is AnthropicAdapter else 401)
    assert "was not opened" in body["error"]["message"]
    for more_headers, status in (({"Origin": "http://evil.example"}, 403), ({"Content-Type": "text/plain"}, 415)):
        assert post(handle.url + path, {**BODY, **more}, **headers, **more_headers)[0] == status
    rebound = post(handle.url + path, {**BODY, **more}, **headers, Host="evil.example")[1]["error"]["message"]
    assert ("Host: 'evil.example' is not known here" in rebound) == (sid == "default")  # the default id is public
    adapter.open_session(sid)
    with pytest.raises(ValueError, match="is already known"):
        adapter.open_session(sid)
    assert post(handle.url + path, {**BODY, **more}, **headers)[0] == 200
    assert adapter.manager.has_session(sid)


@pytest.mark.parametrize(
    ("kind", "headers", "more"),
    [
        (OpenAIAdapter, {"Authorization": "Bearer s"}, {}),
        (OpenAIAdapter, {}, {"user": "s"}),
        (AnthropicAdapter, {"X-Api-Key": "s"}, {}),
    ],
)
def test_large_body_is_parsed_off_the_event_loop(
    serve: Any, spoken: list[Turn], monkeypatch: pytest.MonkeyPatch, kind: Any, headers: Any, more: Any
) -> None:
    in_threads: list[bool] = []

    class Noting(kind):  # type: ignore[misc]
        def _translate(self, dialect: Any, request: Any, body: Any) -> Any:
            in_threads.append(threading.current_thread().name.startswith("agents"))
            return super()._translate(dialect, request, body)

    def noted(body: bytes) -> Any:
        in_threads.append(threading.current_thread().name.startswith("agents"))
        return parse_json(body)

    monkeypatch.setattr("slime.agent.adapters.base.parse_json", noted)
    _, adapter, handle = serve(Noting, spoken[1:] * 2)
    adapter.open_session("s", sampling_defaults=DEFAULTS)
    path = "/v1/messages" if kind is AnthropicAdapter else "/v1/chat/completions"
    for blanks in (0, 100_000):
        status, _ = post(handle.url + path, {**BODY, **more, "metadata": {"x": " " * blanks}}, **headers)
        assert (status, in_threads) == (200, [blanks > 0] * 2)
        in_threads.clear()


def test_body_limits_apply_before_the_body_is_read(serve: Any, spoken: list[Turn]) -> None:
    _, adapter, handle = serve(OpenAIAdapter, spoken[1:])
    adapter.open_session("s", sampling_defaults=DEFAULTS)

    def begin(*lines: str) -> bytes:
        """Send only the headers of a request; return the answer."""
        head = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines]
        with socket.create_connection((handle.host, handle.port), timeout=120) as client:
            client.sendall("\r\n".join([*head, "", ""]).encode())
            answer = b""
            while b" bytes" not in answer and (more := client.recv(4096)):
                answer += more
            return answer

    for lines in ((), ("Authorization: Bearer other",)):
        assert b"the body has more than 4194304 bytes" in begin(*lines, f"Content-Length: {5 << 20}")
    assert b"the body has more than 67108864 bytes" in begin("Authorization: Bearer s", f"Content-Length: {65 << 20}")
    body = {"model": "m", "messages": [ASK], "metadata": {"x": " " * (5 << 20)}}
    assert post(f"{handle.url}/v1/chat/completions", body, Authorization="Bearer s")[0] == 200
    assert post(f"{handle.url}/v1/chat/completions", body)[0] == 400


def test_turn_limit_and_shutdown_end_a_client_without_retries(serve: Any, spoken: list[Turn]) -> None:
    engine, adapter, handle = serve(OpenAIAdapter, spoken, max_turns_per_sid=1)
    adapter.open_session("s", sampling_defaults=DEFAULTS)
    with pytest.raises(openai.NotFoundError, match="has reached its limit of 1 turns"):
        chat(handle, "s", stream=False)
    asyncio.run(adapter.shutdown_session("s"))
    with pytest.raises(openai.NotFoundError, match="this session is over"):
        chat(handle, "s", stream=True)
    [made] = asyncio.run(adapter.finish_session("s", base_sample=sample()))
    assert made.status is Sample.Status.TRUNCATED
    assert len(engine.requests) == 1


def test_a_dropped_session_has_no_samples(serve: Any, spoken: list[Turn]) -> None:
    _, adapter, handle = serve(OpenAIAdapter, spoken)
    adapter.open_session("s", sampling_defaults=DEFAULTS)
    chat(handle, "s", stream=False)
    asyncio.run(adapter.drop_session("s"))
    assert asyncio.run(adapter.finish_session("s", base_sample=sample())) == []
    assert not adapter.manager.has_session("s")


def test_too_long_prompt_error_has_the_token_counts(serve: Any, spoken: list[Turn]) -> None:
    _, adapter, handle = serve(AnthropicAdapter, spoken)
    adapter.open_session("s", max_context_tokens=4)
    status, body = post(f"{handle.url}/v1/messages", BODY, **{"X-Api-Key": "s"})
    assert status == 400
    assert body["error"]["message"].startswith("prompt is too long: ")
    assert body["error"]["message"].endswith(" tokens > 3 maximum")
    status, counted = post(f"{handle.url}/v1/messages/count_tokens", BODY, **{"X-Api-Key": "s"})
    assert status == 200
    assert counted["input_tokens"] > 4


@pytest.mark.parametrize("wait", [120.0, 0.0], ids=["waits", "gives up"])
def test_finish_waits_for_a_turn_in_flight_or_abandons_it(serve: Any, agent_tokenizer: Any, wait: float) -> None:
    turn = Turn.of(agent_tokenizer, "the answer is 46", hold_after=2)
    engine, adapter, handle = serve(OpenAIAdapter, [turn])
    adapter.open_session("s", sampling_defaults=DEFAULTS)
    answers: list[Any] = []
    body = {"model": "m", "messages": [ASK]}

    def client() -> None:
        answers.append(post(f"{handle.url}/v1/chat/completions", body, Authorization="Bearer s"))

    thread = threading.Thread(target=client)
    thread.start()
    assert engine.holding.wait(120)
    assert adapter.inflight["s"] == 1

    async def finish() -> list[Sample]:
        ending = asyncio.ensure_future(adapter.finish_session("s", base_sample=sample(), wait_timeout=wait))
        while "s" not in adapter.closed:  # noqa: ASYNC110 - in another thread
            await asyncio.sleep(0.01)
        if wait:
            engine.release()
        return await ending

    samples = asyncio.run(finish())
    thread.join(120)
    [(status, _)] = answers
    assert (status, len(samples)) == ((200, 1) if wait else (404, 0))


def test_subclasses_may_override_the_session_id_and_the_body(serve: Any, spoken: list[Turn]) -> None:
    class Mine(OpenAIAdapter):
        def _session_id(self, request: Any, body: Any) -> str:
            return request.headers["X-Task"]

        def _preprocess_body(self, body: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in body.items() if name != "odd_field"}

    told: list[dict[str, Any]] = []
    engine, adapter, handle = serve(Mine, spoken[1:], debug_callback=told.append)
    adapter.open_session("task-7", sampling_defaults=DEFAULTS)
    body = {"model": "m", "messages": [ASK], "odd_field": 1}
    assert post(f"{handle.url}/v1/chat/completions", body, **{"X-Task": "task-7"})[0] == 200
    assert adapter.manager.turn_count("task-7") == 1
    [turn] = told
    assert (turn["sid"], turn["output_ids"]) == ("task-7", list(spoken[1].ids))
    assert turn["prompt_ids"] == engine.requests[0].input_ids.tolist()


def test_other_routes_answer_and_invalid_bodies_are_rejected(serve: Any, spoken: list[Turn]) -> None:
    _, adapter, handle = serve(OpenAIAdapter, spoken)
    adapter.open_session("default")
    assert post(f"{handle.url}/healthz", None) == (200, {"ok": True})
    assert post(f"{handle.url}/v1/models", None)[1]["data"][0]["id"] == "slime-actor"
    status, body = post(f"{handle.url}/v1/embeddings", {})
    assert (status, body["error"]["code"]) == (404, "unknown_url")
    assert post(f"{handle.url}/v1/chat/completions", [1])[0] == 400
    assert post(f"{handle.url}/v1/chat/completions", {"model": "m", "messages": "hi"})[0] == 400


def test_rejects_an_unknown_tool_parser(agent_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="tool-call-parser nope: unknown name"):
        OpenAIAdapter(tokenizer=agent_tokenizer, sglang_url="http://x", tool_parser="nope")


def test_call_sglang_generate_sends_one_request(play: Any, spoken: list[Turn], agent_tokenizer: Any) -> None:
    engine, url = play(spoken)
    ids = agent_tokenizer.encode("hello")
    answer = asyncio.run(call_sglang_generate(url, ids, {"max_new_tokens": 300}, sid="s"))
    assert answer["output_ids"] == list(spoken[0].ids)
    [asked] = engine.requests
    assert asked.headers["X-SMG-Routing-Key"] == "s"
    assert asked.params["no_stop_trim"] is True


def test_threaded_application_ends_with_its_handle(agent_tokenizer: Any) -> None:
    adapter = OpenAIAdapter(tokenizer=agent_tokenizer, sglang_url="http://127.0.0.1:9")
    with run_app_in_thread(adapter.app, "127.0.0.1", 0, runner_kwargs={"handler_cancellation": True}) as handle:
        assert post(f"{handle.url}/healthz", None)[0] == 200
    with pytest.raises(urllib.error.URLError):
        post(f"{handle.url}/healthz", None)
    handle.stop()
    assert "slime-app" not in {thread.name for thread in threading.enumerate()}


def test_helper_functions_match_upstream() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "image"}, {"type": "tool_result", "content": "c"}]
    assert flatten_content(parts) == "a\nb\n[image omitted]\nc"
    assert (flatten_content(None), flatten_content("x")) == ("", "x")
    assert tool_call_dict("f", '{"a": 1}') == {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert tool_call_dict("f", {"a": 1}, "id1")["id"] == "id1"
    assert [manager_finish_reason(reason) for reason in ("end_turn", {"type": "length"}, "tool_use", None)] == [
        "stop",
        "length",
        "tool_calls",
        "stop",
    ]
    assert sid_from_body({"metadata": "no", "user": "u"}) == "u"
    assert sid_from_body({"metadata": {"session_id": "s"}, "user": "u"}) == "s"
    assert TurnRecord([1], [2], "stop").output_ids == [2]
