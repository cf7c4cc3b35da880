"""Streamed and whole answers, read by the official SDKs, are equal and are parsed back as the same turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.messages import Message, ToolCall
from slime.agent.server.dialects import (
    DIALECTS,
    Asked,
    Dialect,
    FinishedTurn,
    Kind,
    Problem,
    TokenLogProb,
    Usage,
)
from slime.models.parsers.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    IllFormed,
    Reasoning,
    Text,
    gathered,
)
from tests.agent.dialects.bodies import CODEX, SHELL
from tests.rows import examples

CHAT, RESPONSES, MESSAGES = DIALECTS
USAGE = Usage(prompt=120, cached=100, completion=33, reasoning=5)
ASK = [{"role": "user", "content": "Write it."}]


class DialectTransport:
    """Connects the SDKs to one dialect by a mock transport that encodes the given events, without a server."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.events: list[Event] = []
        self.finish = "stop"
        self.log_probs: list[TokenLogProb] | None = None
        self.problem: Problem | None = None
        self.seen: list[Asked] = []
        self.stream = b""
        client = httpx2.Client(transport=httpx2.MockTransport(self._answer))
        self.openai = openai.OpenAI(base_url="http://x/v1", api_key="k", http_client=client, max_retries=2)
        self.anthropic = anthropic.Anthropic(base_url="http://x", api_key="k", http_client=client, max_retries=2)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        asked = self.dialect.asked(request.url.path, json.loads(request.content))
        self.seen.append(asked)
        if self.problem is not None and not asked.stream:
            status, headers, body = self.dialect.problem(self.problem)
            return httpx2.Response(status, headers=headers, json=body)
        finished = FinishedTurn(f"turn_{len(self.seen)}", gathered(self.events), self.finish, USAGE, self.log_probs)
        if not asked.stream:
            return httpx2.Response(200, json=self.dialect.whole(asked, finished))
        self.stream = b"".join(self._pieces(asked, finished))
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=self.stream)

    def _pieces(self, asked: Asked, finished: FinishedTurn) -> Iterator[bytes]:
        writer = self.dialect.writer(asked, finished.reference)
        yield writer.begin() + writer.keep_alive()
        for event in self.events:
            yield writer.event(event) + writer.keep_alive()
        yield writer.end(finished) if self.problem is None else writer.problem(self.problem)


WIRES = {dialect.name: DialectTransport(dialect) for dialect in DIALECTS}
FUNCTION = {"name": "bash", "description": "Run", "parameters": SHELL}


def chat_message(events: list[Event], stream: bool, finish: str = "stop") -> tuple[Any, dict[str, Any]]:
    """Return the SDK's completion and its message as a client sends it back."""
    wire = WIRES["chat"]
    wire.events, wire.finish = events, finish
    tools: Any = [{"type": "function", "function": FUNCTION}]
    if stream:
        options: Any = {"include_usage": True}
        with wire.openai.chat.completions.stream(model="m", messages=ASK, tools=tools, stream_options=options) as said:
            completion: Any = said.get_final_completion()
    else:
        completion = wire.openai.chat.completions.create(model="m", messages=ASK, tools=tools)
    message = completion.choices[0].message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", []):
        call.pop("index", None)  # added by the SDK, only in streams
        call["function"].pop("parsed_arguments", None)
    said = {"content": "", **message}
    return completion, {name: said[name] for name in sorted(said) if name != "parsed"}


def response(events: list[Event], stream: bool, finish: str = "stop") -> tuple[Any, list[dict[str, Any]]]:
    wire = WIRES["responses"]
    wire.events, wire.finish = events, finish
    asking: Any = {"model": "m", "input": ASK, "tools": CODEX["tools"]}
    if stream:
        answer: Any = None
        with wire.openai.responses.stream(**asking) as said:
            for event in said:
                if event.type in ("response.completed", "response.incomplete"):
                    answer = event.response
    else:
        answer = wire.openai.responses.create(**asking)
    items = [item.model_dump(exclude_none=True) for item in answer.output]
    return answer, [{name: value for name, value in item.items() if name != "parsed_arguments"} for item in items]


def message(events: list[Event], stream: bool, finish: str = "stop") -> tuple[Any, list[dict[str, Any]]]:
    wire = WIRES["messages"]
    wire.events, wire.finish = events, finish
    asking: Any = {"model": "m", "messages": ASK, "max_tokens": 99}
    if stream:
        with wire.anthropic.messages.stream(**asking) as said:
            answer: Any = said.get_final_message()
    else:
        answer = wire.anthropic.messages.create(**asking)
    return answer, [block.model_dump(exclude_none=True) for block in answer.content]


def parse_back(name: str, history: list[Any]) -> Message:
    """Parse the turn from a request that sends it back."""
    dialect = WIRES[name].dialect
    body: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [*ASK, *history, *ASK]}
    if name == "responses":
        body = {"model": "m", "input": [*ASK, *history, *ASK]}
    return dialect.asked(dialect.paths[0], body).request.messages[1]


THINK_TEXT_CALLS: list[Event] = [
    Reasoning("I "),
    Reasoning("think \u2028 é"),
    Text("\n\n"),
    Text("So"),
    Text(" be it.\n"),
    CallBegun(0, "call_a", "bash"),
    CallArguments(0, '{"command":'),
    CallArguments(0, ' "ls é"}'),
    CallEnded(0),
    Text("\n"),
    CallBegun(1, "call_b", "bash"),
    CallArguments(1, '{"command": "pwd"}'),
    CallEnded(1),
]
CALLS = (ToolCall("call_a", "bash", '{"command": "ls é"}'), ToolCall("call_b", "bash", '{"command": "pwd"}'))


@pytest.mark.parametrize("stream", [False, True])
def test_chat_keeps_parallel_calls_reasoning_and_text(stream: bool) -> None:
    completion, said = chat_message(THINK_TEXT_CALLS, stream)
    assert completion.choices[0].finish_reason == "tool_calls"
    assert said["reasoning_content"] == "I think \u2028 é"
    assert said["content"].rstrip() == "\n\nSo be it."
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [call.arguments for call in CALLS]
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (120, 33, 153)
    assert (usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details.reasoning_tokens) == (100, 5)
    back = parse_back("chat", [said])
    assert (back.tool_calls, back.reasoning) == (CALLS, "I think \u2028 é")


@pytest.mark.parametrize("stream", [False, True])
def test_messages_keep_parallel_calls_reasoning_and_text(stream: bool) -> None:
    answer, blocks = message(THINK_TEXT_CALLS, stream)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert blocks[2]["input"] == {"command": "ls é"}
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (20, 100, 33)
    back = parse_back("messages", [{"role": "assistant", "content": blocks}])
    assert back.reference == answer.id.removeprefix("msg_") == blocks[0]["signature"]
    assert (back.tool_calls, back.reasoning) == (CALLS, "I think \u2028 é")


@pytest.mark.parametrize("stream", [False, True])
def test_responses_keep_parallel_calls_reasoning_and_text(stream: bool) -> None:
    answer, items = response(THINK_TEXT_CALLS, stream)
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert (answer.status, answer.output_text.rstrip()) == ("completed", "\n\nSo be it.")
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (120, 33, 153)
    assert answer.usage.input_tokens_details.cached_tokens == 100
    back = parse_back("responses", items)
    assert back.reference == answer.id.removeprefix("resp_") == items[0]["encrypted_content"]
    assert (back.tool_calls, back.reasoning) == (CALLS, "I think \u2028 é")


@pytest.mark.parametrize("stream", [False, True])
def test_namespaced_and_custom_tools_are_called_as_declared(stream: bool) -> None:
    events: list[Event] = [
        CallBegun(0, "call_a", "mcp__docs__find"),
        CallArguments(0, '{"command": "x"}'),
        CallEnded(0),
        CallBegun(1, "call_b", "apply_patch"),
        CallArguments(1, '{"input": "*** Begin\\n'),
        CallArguments(1, 'é"}'),
        CallEnded(1),
    ]
    _, items = response(events, stream)
    assert (items[0]["namespace"], items[0]["name"], items[0]["call_id"]) == ("mcp__docs", "find", "call_a")
    assert (items[1]["type"], items[1]["name"], items[1]["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "*** Begin\né",
    )
    back = parse_back("responses", items)
    assert [call.name for call in back.tool_calls] == ["mcp__docs__find", "apply_patch"]


def test_responses_stream_events_are_numbered_and_complete() -> None:
    response(THINK_TEXT_CALLS, stream=True)
    events = [json.loads(line[6:]) for line in WIRES["responses"].stream.decode().splitlines() if line[:5] == "data:"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events if not event["type"].endswith("delta")] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


CUT: list[Event] = [Text("So "), CallBegun(0, "call_a", "bash"), CallArguments(0, '{"command":'), IllFormed("cut", 0)]
CUT.append(Text('<tool_call>{"command":'))


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_call_becomes_text_of_an_incomplete_turn(stream: bool) -> None:
    text = 'So <tool_call>{"command":'
    answer, blocks = message(CUT, stream, "length")
    assert (answer.stop_reason, blocks) == ("max_tokens", [{"type": "text", "text": text}])
    answer, items = response(CUT, stream, "length")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [(item["type"], item["status"]) for item in items] == [("message", "incomplete")]
    assert answer.output_text == text
    if stream:
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            chat_message(CUT, True, "length")
        completion: Any = caught.value.completion
    else:
        completion, _ = chat_message(CUT, False, "length")
    assert (completion.choices[0].finish_reason, completion.choices[0].message.content) == ("length", text)
    assert not completion.choices[0].message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_chat_returns_the_log_prob_of_every_sampled_token(stream: bool) -> None:
    wire = WIRES["chat"]
    wire.events, wire.finish = [Text("é!")], "stop"
    wire.log_probs = [TokenLogProb("\ufffd", b"\xc3", -0.5), TokenLogProb("\ufffd", b"\xa9", -0.25)]
    try:
        asking: Any = {"model": "m", "messages": ASK, "logprobs": True}
        if stream:
            with wire.openai.chat.completions.stream(**asking) as said:
                completion: Any = said.get_final_completion()
        else:
            completion = wire.openai.chat.completions.create(**asking)
    finally:
        wire.log_probs = None
    content = completion.choices[0].logprobs.content
    assert [(entry.logprob, bytes(entry.bytes)) for entry in content] == [(-0.5, b"\xc3"), (-0.25, b"\xa9")]
    assert wire.seen[-1].want_log_probs


def test_chat_stream_omits_usage_unless_requested() -> None:
    wire = WIRES["chat"]
    wire.events, wire.finish = [Text("a")], "stop"
    list(wire.openai.chat.completions.create(model="m", messages=ASK, stream=True))  # type: ignore[call-overload]
    assert b"usage" not in wire.stream
    assert wire.stream.endswith(b"data: [DONE]\n\n")


BLANK = st.sampled_from(["", " ", "\n", "\n\n"])
WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def answers(draw: Any) -> list[Event]:
    """Generate an answer in the usual order, cut into pieces, with white space where models put it."""
    events: list[Event] = [Reasoning(piece) for piece in draw(st.lists(BLANK | WORDS, max_size=4))]
    events += [Text(piece) for piece in draw(st.lists(BLANK | WORDS, max_size=4))]
    if draw(st.booleans()):
        events.append(IllFormed("no reason"))
    for index in range(draw(st.integers(0, 3))):
        events.append(CallBegun(index, f"call_{index}", draw(st.sampled_from(["bash", "apply_patch"]))))
        arguments = json.dumps({"input": draw(WORDS)}, ensure_ascii=draw(st.booleans()))
        cut = draw(st.integers(0, len(arguments)))
        events += [CallArguments(index, arguments[:cut]), CallArguments(index, arguments[cut:]), CallEnded(index)]
    return events


@settings(max_examples=examples(60), deadline=None)
@given(answers())
def test_streamed_and_whole_answers_are_equal(events: list[Event]) -> None:
    output = gathered(events)
    for name, ask in (("chat", chat_message), ("responses", response), ("messages", message)):
        (_, whole), (_, streamed) = ask(events, False), ask(events, True)
        references = [f"turn_{len(WIRES[name].seen) - back}" for back in (1, 0)]
        texts = [json.dumps(said) for said in (whole, streamed)]
        assert texts[0].replace(references[0], "turn") == texts[1].replace(references[1], "turn")
        history: Any = {"chat": [whole], "responses": whole, "messages": [{"role": "assistant", "content": whole}]}
        if not whole or not (output.text.strip() or output.calls or (output.reasoning or "").strip()):
            continue
        back = parse_back(name, history[name])
        assert back.content == (output.text if output.text.strip() else "")
        assert back.reasoning == (output.reasoning if (output.reasoning or "").strip() else None)
        assert [call.id for call in back.tool_calls] == [call.id for call in output.calls]
        assert [json.loads(call.arguments) for call in back.tool_calls] == [
            json.loads(call.arguments) for call in output.calls
        ]


@pytest.mark.parametrize("kind", list(Kind))
def test_problem_during_a_stream_ends_it_with_an_error(kind: Kind) -> None:
    problem = Problem(kind, "No more.", tokens=9 if kind is Kind.TOO_LONG else None, limit=8)
    for wire in WIRES.values():
        wire.problem = problem
    try:
        with pytest.raises(openai.APIError):
            chat_message([Text("a")], stream=True)
        with pytest.raises(anthropic.APIStatusError):
            message([Text("a")], stream=True)
        events = []
        wire = WIRES["responses"]
        wire.events = [Text("a")]
        with wire.openai.responses.stream(model="m", input="x") as said:
            events = list(said)
    finally:
        for wire in WIRES.values():
            wire.problem = None
    last: Any = events[-1]
    assert last.type == "response.failed"
    retried = {
        Kind.ENGINE_FAILED: "server_error",
        Kind.FULL: "rate_limit_exceeded",
        Kind.TOO_LONG: "context_length_exceeded",
    }
    assert last.response.error.code == retried.get(kind, "invalid_prompt")


@pytest.mark.parametrize("kind", list(Kind))
def test_sdks_retry_only_retryable_problems(kind: Kind) -> None:
    problem = Problem(kind, "No more.")
    tries = 3 if kind in (Kind.ENGINE_FAILED, Kind.FULL) else 1
    asks: dict[str, Any] = {"chat": chat_message, "responses": response, "messages": message}
    for name, ask in asks.items():
        wire = WIRES[name]
        wire.problem, before = problem, len(wire.seen)
        wire.openai._sleep_for_retry = wire.anthropic._sleep_for_retry = lambda **_: None  # type: ignore[assignment]
        try:
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match=r"No more\."):
                ask([], False)
        finally:
            wire.problem = None
        assert len(wire.seen) - before == tries
