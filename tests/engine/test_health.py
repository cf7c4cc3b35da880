"""An engine that makes progress is healthy however long its queue is; one without progress is not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.http import server as server_module
from slime.engine.embedded.http.async_engine import EngineBridge
from slime.engine.embedded.http.requests import ModelFacts
from slime.engine.embedded.http.server import EngineServer
from slime.engine.fleet.supervisor import HealthCheckSettings, Supervisor
from slime.engine.http.client import Growing
from slime.engine.http.pool import EnginePool
from slime.rollout.event_loop import LoopThread
from tests.engine.test_numbers import running_core
from tests.tiny_models import make_tokenizer

LONG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 250, "temperature": 0, "ignore_eos": True}}


async def health(core: EngineCore) -> tuple[int, dict[str, Any]]:
    response = await EngineServer(bridge_to(core)).health_generate(None)  # type: ignore[arg-type]
    return response.status, json.loads(response.body)  # type: ignore[arg-type]


def bridge_to(core: EngineCore) -> EngineBridge:
    bridge = EngineBridge(core)
    bridge.facts = ModelFacts(make_tokenizer(), core.loaded.vocab_size, core.loaded.context_len, frozenset())
    return bridge


def test_engine_with_all_rows_in_use_is_healthy(qwen3_folder: Path) -> None:
    """The probe succeeds while the only row is in use and another request waits for it."""

    async def ask(core: EngineCore) -> bool:
        bridge = bridge_to(core)
        requests = [server_module.parse_generate(LONG, bridge.loaded)[0][0] for _ in range(2)]
        working = [asyncio.ensure_future(bridge.run([request])) for request in requests]
        while core.steps.counters.generated_tokens == 0:  # noqa: ASYNC110 (of another thread)
            await asyncio.sleep(0)
        assert await health(core) == (200, {"status": "ok"})
        if any(task.done() for task in working):
            return False
        done = await asyncio.gather(*working)
        assert [len(finished.sequence.output_ids) for [finished] in done] == [250, 250]
        assert core.steps.counters.requests == 2  # the probe queues no request
        return True

    for _ in range(5):  # retry if the engine finished a request before the probe
        with running_core(qwen3_folder, "--max-running-requests", "1") as core:
            if asyncio.run(ask(core)):
                return
    raise AssertionError("the probe never came in time")


def test_idle_engine_generates_one_token_for_the_probe(qwen3_folder: Path) -> None:
    with running_core(qwen3_folder) as core:
        assert asyncio.run(health(core)) == (200, {"status": "ok"})
        assert core.steps.counters.generated_tokens == 1


@pytest.mark.parametrize("is_working", [False, True])
def test_engine_without_progress_is_unhealthy(
    qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch, is_working: bool
) -> None:
    monkeypatch.setattr(server_module, "_PROBE_SECONDS", 0.2)
    stuck, free = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        assert free.wait(240)

    async def ask(core: EngineCore) -> None:
        bridge = bridge_to(core)
        if is_working:
            [request], _ = server_module.parse_generate(LONG, bridge.loaded)
            working = asyncio.ensure_future(bridge.run([request]))
            while core.steps.counters.generated_tokens == 0:  # noqa: ASYNC110 (of another thread)
                await asyncio.sleep(0)
        hanging = core.call(hang)
        await asyncio.to_thread(stuck.wait, 240)
        status, answer = await health(core)
        assert (status, "no token within" in answer["error"]["message"]) == (503, True)
        free.set()
        await asyncio.wrap_future(hanging)
        monkeypatch.setattr(server_module, "_PROBE_SECONDS", 120.0)
        assert (await health(core))[0] == 200
        if is_working:
            working.cancel()

    with running_core(qwen3_folder) as core:
        asyncio.run(ask(core))


class BusyEngine:
    """A server whose health check fails like that of an engine too busy to answer in time.

    While `streams` is set it streams one token at each health check.
    """

    def __init__(self) -> None:
        self.streams = True
        self.restarted: list[int] = []
        self.news: asyncio.Event | None = None
        self.urls: list[str] = []

    async def health(self, request: web.Request) -> web.Response:
        assert self.news is not None
        if self.streams:
            self.seen = asyncio.Event()
            self.news.set()
            await self.seen.wait()
        return web.Response(status=503)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.news = asyncio.Event()
        while True:
            await response.write(b'data: {"output_ids": [1]}\n\n')
            await self.news.wait()
            self.news.clear()

    def why_ended(self, index: int) -> str | None:
        return None

    def restart(self, index: int) -> None:
        self.restarted.append(index)


@contextmanager
def supervised(engine: BusyEngine) -> Iterator[tuple[EnginePool, LoopThread, Supervisor]]:
    loop = LoopThread("test")

    async def start() -> tuple[web.AppRunner, EnginePool]:
        app = web.Application()
        app.router.add_get("/health_generate", engine.health)
        app.router.add_post("/generate", engine.generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.urls = [f"http://127.0.0.1:{runner.addresses[0][1]}"]
        return runner, EnginePool(engine.urls)

    runner, pool = loop.run(start())
    supervisor = Supervisor(engine, pool, loop.run, HealthCheckSettings(60.0, 120.0, 60.0, 3), refresh=None)
    try:
        yield pool, loop, supervisor
    finally:
        supervisor.close()
        loop.run(pool.aclose())
        loop.run(runner.cleanup())
        loop.close()


def test_engine_that_streams_tokens_is_not_restarted() -> None:
    engine = BusyEngine()
    with supervised(engine) as (pool, loop, supervisor):

        async def begin() -> asyncio.Task[Any]:
            client, first = pool.clients[0], asyncio.Event()

            class Noticed(Growing):
                def take(self, event: bytes) -> None:
                    first.set()
                    if hasattr(engine, "seen"):
                        asyncio.get_running_loop().call_soon(engine.seen.set)

            task = asyncio.ensure_future(client.stream_generate(Noticed(), {}))
            async with asyncio.timeout(240):
                await first.wait()
            return task

        task = loop.run(begin())
        supervisor._round(probe=True)
        assert engine.restarted == []
        engine.streams = False
        supervisor._round(probe=True)
        assert engine.restarted == [0]

        async def end() -> None:
            task.cancel()

        loop.run(end())
