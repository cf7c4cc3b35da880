"""Streamed answers: both stream dialects, long lines and responses of 65,536 tokens."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiohttp import web

from slime.engine.embedded.http.async_engine import EngineBridge
from slime.engine.embedded.http.requests import ModelFacts
from slime.engine.embedded.http.server import EngineServer
from slime.engine.embedded.options import parse_options
from slime.engine.embedded.scheduler import Sequence
from slime.engine.http.client import EngineClient, Growing
from slime.engine.http.errors import EngineFailed, EngineProtocolError, EngineUnreachable
from tests.engine.test_client import Server, call
from tests.tiny_models import make_tokenizer

LONG = 65_536


def logprob(at: int) -> float:
    return -(at % 97 + 1) / 16


def event(start: int, end: int, count: int, *, finish: dict[str, Any] | None = None) -> bytes:
    """A stream event with tokens `start:end` of an answer that has `count` tokens so far."""
    ids = [3 + at % 300 for at in range(start, end)]
    entries = [[logprob(at), 3 + at % 300, None] for at in range(start, end)]
    meta = {"id": "x", "completion_tokens": count, "prompt_tokens": 3, "cached_tokens": 1, "weight_version": "2",
            "finish_reason": finish, "output_token_logprobs": entries}  # fmt: skip
    return orjson.dumps({"text": "ab" * (end - start), "output_ids": ids, "meta_info": meta})


def streaming(events: list[bytes]) -> Server:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for data in events:
            await response.write(b"data: " + data + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    return Server(handler)


def stream_result(server: Server) -> Any:
    async def use(client: EngineClient) -> Any:
        growing = Growing()
        await client.stream_generate(growing, {"input_ids": [1, 2, 3], "return_logprob": True})
        return await client.streamed_result(growing, None)

    return call(server, use)


END = {"type": "length", "length": LONG}


@pytest.mark.parametrize("dialect", ["whole", "new"])
def test_client_reads_a_stream_of_65536_tokens(dialect: str) -> None:
    """In the dialect "whole" the last event is one line of several megabytes."""
    places = [0, 32, 64, 20_000, LONG]
    spans = list(pairwise(places))
    events = [
        event(start if dialect == "new" else 0, end, end, finish=END if end == LONG else None) for start, end in spans
    ]
    result = stream_result(streaming(events))
    assert result.token_ids == [3 + at % 300 for at in range(LONG)]
    assert result.log_probs == [logprob(at) for at in range(LONG)]
    assert (result.text, result.meta_info["completion_tokens"], result.finish_type) == ("ab" * LONG, LONG, "length")


def test_broken_stream_returns_its_tokens_as_an_abort() -> None:
    async def use(client: EngineClient) -> Any:
        growing = Growing()
        await client.stream_generate(growing, {"input_ids": [1]})
        return await client.streamed_result(
            growing, EngineUnreachable(client.base_url, "/generate", "died", accepted=True)
        )

    result = call(streaming([event(0, 4, 4), event(4, 9, 9)]), use)
    assert (result.meta_info["completion_tokens"], result.finish_type, len(result.token_ids)) == (9, "abort", 9)


def test_stream_dialect_is_detected_at_every_event() -> None:
    growing = Growing()
    for data, tokens in ((event(0, 2, 2), 2), (event(2, 5, 5), 5), (event(5, 5, 5), 5), (event(0, 7, 7), 7)):
        growing.take(data)
        assert growing.tokens == tokens
        assert growing.latest is not None
        assert growing.latest["output_ids"] == [3 + at for at in range(tokens)]
        assert len(growing.latest["meta_info"]["output_token_logprobs"]) == tokens
        assert growing.latest["text"] == "ab" * tokens


@pytest.mark.parametrize(
    "damaged",
    [
        event(3, 5, 6),
        b"nonsense",
        b"[]",
        b'{"meta_info": {}}',
        b'{"meta_info": {"completion_tokens": "5"}}',
        b'{"meta_info": {"completion_tokens": 5, "output_token_logprobs": [1]}, "output_ids": [1, 2]}',
    ],
)
def test_rejects_malformed_stream_events_without_changes(damaged: bytes) -> None:
    growing = Growing()
    growing.take(event(0, 3, 3))
    before = growing.latest
    with pytest.raises(ValueError, match=r"tokens|not a response|different lengths"):
        growing.take(damaged)
    assert growing.latest == before
    with pytest.raises(EngineProtocolError, match="streamed"):
        stream_result(streaming([event(0, 3, 3), damaged]))


def test_error_event_in_a_stream_raises_engine_failed() -> None:
    error = json.dumps({"error": {"message": "broken on purpose", "code": 500}}).encode()
    with pytest.raises(EngineFailed, match="broken on purpose"):
        stream_result(streaming([event(0, 3, 3), error]))


class ScriptedCore:
    """An engine core whose thread appends scripted tokens instead of running a model."""

    weight_version, weights, halted = "5", SimpleNamespace(stale=None), False

    def __init__(self, *options: str) -> None:
        self.options = parse_options(["--model-path", "scripted", *options])
        self.broken = False

    def submit(self, sequences: list[Sequence]) -> None:
        threading.Thread(target=self._run, args=(sequences[0],), daemon=True).start()

    def _run(self, seq: Sequence) -> None:
        while seq.finish is None:
            if self.broken and len(seq.output_ids) == 100:
                seq.end({"type": "abort", "message": "broken on purpose", "status_code": 500})
            else:
                at = len(seq.output_ids)
                seq.append(3 + at % 300, logprob(at), "5")
            if seq.finish is None and seq.stream:
                seq.notify(seq)
        seq.notify(seq)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        return Future()


def with_embedded_server(core: ScriptedCore, use: Callable[[EngineClient], Any]) -> Any:
    async def main() -> Any:
        engine = EngineBridge(core)  # type: ignore[arg-type]
        engine.facts = ModelFacts(make_tokenizer(), 320, LONG + 10, frozenset())
        runner = web.AppRunner(EngineServer(engine).app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=120) as client:
                return await use(client)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_embedded_server_streams_each_of_65536_tokens_once() -> None:
    body = {
        "input_ids": [1, 2],
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True},
    }
    sizes: list[int] = []

    class Weighed(Growing):
        def take(self, event: bytes) -> None:
            sizes.append(len(event))
            super().take(event)

    async def use(client: EngineClient) -> Any:
        growing = Weighed()
        await client.stream_generate(growing, body)
        return await client.streamed_result(growing, None), await client.generate_result(body)

    streamed, whole = with_embedded_server(
        ScriptedCore("--stream-interval", "32", "--incremental-streaming-output"), use
    )
    assert streamed.token_ids == whole.token_ids == [3 + at % 300 for at in range(LONG)]
    assert streamed.log_probs == whole.log_probs
    assert streamed.text == whole.text == make_tokenizer().decode(whole.token_ids, skip_special_tokens=True)
    assert (streamed.finish_type, streamed.meta_info["weight_versions"]) == (
        "length",
        whole.meta_info["weight_versions"],
    )
    assert len(sizes) > 1
    assert sum(sizes) < 60 * LONG  # linear: repeating all tokens in each event would take thousands of bytes per token


@pytest.mark.parametrize("call", ["/generate", "/v1/completions"])
def test_failed_request_sends_an_error_event_in_its_stream(call: str) -> None:
    core = ScriptedCore("--stream-interval", "32")
    core.broken = True

    async def use(client: EngineClient) -> bytes:
        body = {"input_ids": [1]} if call == "/generate" else {"prompt": [1]}
        limit = {"sampling_params": {"max_new_tokens": 500}} if call == "/generate" else {"max_tokens": 500}
        data = json.dumps({**body, **limit, "stream": True}).encode()
        async with client.open("POST", call, data=data, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 200
            return await response.read()

    events = with_embedded_server(core, use).strip().split(b"\n\n")
    assert events[-1] == b"data: [DONE]"
    error = json.loads(events[-2].removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"], error["message"]) == (500, "server_error", "broken on purpose")


class StuckCore(ScriptedCore):
    """A core that holds every sequence until it is aborted; one with the prompt [9] fails at once."""

    def __init__(self, *options: str) -> None:
        super().__init__(*options)
        self.kept: set[Sequence] = set()
        self.most = 0

    def submit(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            if seq.prompt_ids == [9]:
                seq.end({"type": "abort", "message": "broken on purpose", "status_code": 500})
                seq.notify(seq)
            else:
                self.kept.add(seq)
        self.most = max(self.most, len(self.kept))

    def abort_sequences(self, sequences: list[Sequence], reason: str) -> None:
        self.kept -= set(sequences)

    def call(self, function: Callable[[], Any], *, meets_steps: bool = False) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function())
        return done


@pytest.mark.parametrize(("call", "prompts"), [("/generate", "input_ids"), ("/v1/completions", "prompt")])
def test_batch_with_a_failed_prompt_leaves_nothing_running(call: str, prompts: str) -> None:
    core = StuckCore("--max-queued-requests", "40")

    async def use(client: EngineClient) -> None:
        for _ in range(3):
            with pytest.raises(EngineFailed, match=r"500.*broken on purpose"):
                await client._body("POST", call, {prompts: [[5]] * 20 + [[9]] + [[5]] * 11}, deadline_s=120)
            assert core.kept == set()

    with_embedded_server(core, use)
    assert 20 <= core.most <= 31
