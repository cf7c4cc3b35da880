"""Engines join and leave a pool: request routing, requests in flight and notifications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from slime.engine.fleet.processes import EngineRetired
from slime.engine.fleet.supervisor import EnginesGivenUp, HealthCheckSettings, Supervisor
from slime.engine.http.errors import EngineFailed, EngineUnreachable
from slime.engine.http.pool import EnginePool
from slime.rollout.event_loop import LoopThread
from slime.rollout.gate import ConcurrencyLimit

LONG = 50


class ScriptedEngine:
    """An HTTP engine on its own port; with `waits`, answers wait for an abort and then return half of their tokens."""

    def __init__(self, *, waits: bool = False) -> None:
        self.app = web.Application()
        self.app.router.add_post("/generate", self.generate)
        self.app.router.add_post("/abort_request", self.abort)
        self.app.router.add_get("/health_generate", self.health)
        self.url = ""
        self.keys: list[str | None] = []
        self.arrived = asyncio.Semaphore(0)
        self.is_well = True
        self._let_go, self._aborted = asyncio.Event(), asyncio.Event()
        if not waits:
            self._let_go.set()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_well else 503)

    async def abort(self, request: web.Request) -> web.Response:
        self._aborted.set()
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        body = await request.json()
        self.arrived.release()
        waits = [asyncio.ensure_future(one.wait()) for one in (self._let_go, self._aborted)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        whole = self._let_go.is_set()
        ids = list(range(body["sampling_params"]["max_new_tokens"]))
        ids = ids if whole else ids[: len(ids) // 2]
        meta = {
            "id": "x", "finish_reason": {"type": "length" if whole else "abort"}, "prompt_tokens": 1,
            "completion_tokens": len(ids), "cached_tokens": 0, "weight_version": "1",
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
        }  # fmt: skip
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[ScriptedEngine]:
        runner = web.AppRunner(self.app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def payload(tokens: int = LONG) -> dict[str, Any]:
    return {"input_ids": [1], "sampling_params": {"max_new_tokens": tokens}, "return_logprob": True}


def with_engines(
    use: Callable[[EnginePool, list[ScriptedEngine]], Coroutine[Any, Any, None]], *, waits: tuple[bool, ...]
) -> None:
    """Run `use(pool, engines)`; the pool has the first engine only."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(ScriptedEngine(waits=one).listening()) for one in waits]
            pool = EnginePool([engines[0].url], patience_s=240.0)
            stack.push_async_callback(pool.aclose)
            async with asyncio.timeout(240):
                await use(pool, engines)

    asyncio.run(main())


def test_added_engine_gets_requests_and_its_own_key_once_up() -> None:
    async def use(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        told: list[tuple[str, str]] = []
        pool.when_changed.append(lambda state, url: told.append((state, url)))
        roster = pool.roster
        client = pool.add(engines[1].url, api_key="secret")
        assert list(roster) == [pool.clients[0], client]
        for _ in range(2):
            await pool.generate(payload())
        assert (len(engines[0].keys), len(engines[1].keys)) == (2, 0)
        pool.set_up(client.base_url)
        await pool.remove(engines[0].url)
        await pool.generate(payload())
        assert engines[1].keys == ["Bearer secret"]
        assert told == [
            ("added", engines[1].url), ("up", engines[1].url), ("removed", engines[0].url),
        ]  # fmt: skip
        with pytest.raises(ValueError, match="already"):
            pool.add(client.base_url)

    with_engines(use, waits=(False, False))


def test_requests_of_a_removed_engine_move_to_another() -> None:
    async def use(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        pool.add(engines[1].url)
        asking = asyncio.ensure_future(pool.sample(payload(), "a group"))
        await engines[0].arrived.acquire()
        pool.set_up(engines[1].url)
        await pool.remove(engines[0].url)
        assert len((await asking).token_ids) == LONG
        assert len(engines[1].keys) == 1
        assert await pool.generate(payload(), "a group")
        assert len(engines[1].keys) == 2

    with_engines(use, waits=(True, False))


def test_request_waits_for_a_new_engine_after_the_last_is_removed() -> None:
    async def use(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        asking = asyncio.ensure_future(pool.sample(payload()))
        await engines[0].arrived.acquire()
        await pool.remove(engines[0].url)
        assert not asking.done()
        assert len(pool) == 0
        pool.add(engines[1].url, up=True)
        assert len((await asking).token_ids) == LONG

    with_engines(use, waits=(True, False))


def test_empty_pool_raises_after_its_patience() -> None:
    async def main() -> None:
        with pytest.raises(EngineUnreachable, match=r"no other engine came up within 0\.01 s"):
            await EnginePool([], may_be_empty=True, patience_s=0.01).generate(payload())

    asyncio.run(main())
    with pytest.raises(ValueError, match="at least one"):
        EnginePool([])


def test_draining_engine_returns_its_partial_tokens() -> None:
    async def use(pool: EnginePool, engines: list[ScriptedEngine]) -> None:
        asking = [asyncio.ensure_future(pool.sample(payload())) for _ in range(8)]
        for _ in asking:
            await engines[0].arrived.acquire()
        pool.add(engines[1].url, up=True)
        assert await pool.drain(engines[0].url, within_s=120.0)
        assert [client.base_url for client in pool.roster] == [engines[1].url]  # it gets no weight updates
        halves = await asyncio.gather(*asking)
        assert [(len(half.token_ids), half.finish_type) for half in halves] == [(LONG // 2, "abort")] * 8
        await pool.generate(payload())
        assert (len(engines[0].keys), len(engines[1].keys)) == (8, 1)
        await pool.remove(engines[0].url)
        assert await pool.drain(engines[0].url, within_s=120.0)  # already removed

    with_engines(use, waits=(True, False))


def test_resizing_seats_changes_the_concurrency_limit() -> None:
    async def main() -> None:
        seats = ConcurrencyLimit(2)
        for _ in range(2):
            await seats.acquire()
        seats.resize(4)
        for _ in range(2):
            await seats.acquire()
        assert seats.locked()
        seats.resize(1)
        for _ in range(3):
            seats.release()
            assert seats.locked()
        seats.release()
        assert not seats.locked()
        seats.resize(3)
        seats.resize(1)  # while no seat is taken
        await seats.acquire()
        waiting = asyncio.ensure_future(seats.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
        seats.release()
        await waiting

    asyncio.run(main())


class MovingFleet:
    """A fleet whose engines get a new address after a restart, or are retired."""

    def __init__(self, urls: list[str], places: list[str]) -> None:
        self.urls, self.places = urls, places

    def why_ended(self, index: int) -> str | None:
        return None

    def restart(self, index: int) -> None:
        if not self.places:
            raise EngineRetired(f"{self.urls.pop(index)} has no place left")
        self.urls[index] = self.places.pop()


def test_supervisor_follows_moved_engines_and_drops_retired_ones() -> None:
    loop, brought, failing = LoopThread("test"), [], []

    def refresh(url: str) -> bool:
        brought.append(url)
        if url in failing:
            raise EngineFailed(url, "/update_weights_from_disk", 500, "no memory")
        return True

    stack = AsyncExitStack()

    async def make() -> tuple[list[ScriptedEngine], EnginePool]:
        engines = [await stack.enter_async_context(ScriptedEngine().listening()) for _ in range(4)]
        return engines, EnginePool([engine.url for engine in engines[:2]])

    engines, pool = loop.run(make())
    first, second, place, newcomer = (engine.url for engine in engines)
    fleet = MovingFleet([first, second], [place])
    watch = HealthCheckSettings(interval_s=60.0, timeout_s=120.0, first_wait_s=60.0, max_restarts=2)
    supervisor = Supervisor(fleet, pool, loop.run, watch, refresh=refresh)
    try:
        engines[0].is_well = False
        supervisor.heal()
        assert (pool.urls, brought, supervisor.changes) == ([second, place], [place], 1)
        assert len(pool.up) == 2
        engines[2].is_well = False
        supervisor.heal()
        assert (pool.urls, supervisor.changes, fleet.urls) == ([second], 3, [second])
        fleet.urls.append(newcomer)
        supervisor.welcome(newcomer)
        assert ([client.base_url for client in pool.up], brought[-1]) == ([second, newcomer], newcomer)
        failing.append(newcomer)
        supervisor.waiting.add(newcomer)
        supervisor.heal()  # the weight update fails: only this engine is removed
        assert pool.urls == [second]
        with pytest.raises(EnginesGivenUp, match="the last engine is gone: its machine was taken away"):
            supervisor.retire(second, "its machine was taken away")
    finally:
        supervisor.close()
        loop.run(stack.aclose())
        loop.run(pool.aclose())
        loop.close()
