"""What the driver tells the process of the endpoints: sessions opened, held, collected; engines that come and go.

Invariant: only who has the secret is heard. Bodies are the journal's bytes (`Codec`), so arrays arrive as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from slime.agent.live.door import Door
from slime.agent.server.dialects import Kind, Problem
from slime.agent.server.listeners import Listeners
from slime.agent.server.sessions import Sessions
from slime.agent.server.settings import Opening
from slime.agent.session.records import BadRecord, message_record
from slime.cluster.http_checks import shows_key
from slime.data.buffer.codec import Codec
from slime.engine.http.pool import EnginePool

MOST_BODY_BYTES = 1 << 30

Call = Callable[[dict[str, Any]], Awaitable[Any]]


class ControlApp:
    """The application behind `control.sock`: each path is one call with named arguments."""

    def __init__(
        self, sessions: Sessions, pool: EnginePool, listeners: Listeners, secret: str, door: Door | None = None
    ) -> None:
        self._sessions, self._pool, self._listeners = sessions, pool, listeners
        self._secret = secret
        self._codec = Codec()
        self.app = web.Application(client_max_size=MOST_BODY_BYTES)
        calls: dict[str, Call] = {
            "open": self._open,
            "close": self._close,
            "turns": self._turns,
            "hold": self._hold,
            "release": self._release,
            "engine": self._engine,
            "version": self._version,
            "stats": self._stats,
        }
        if door is not None:
            calls |= _live_calls(door)
        for name, call in calls.items():
            self.app.router.add_post(f"/{name}", self._handler(call))

    def _handler(self, call: Call) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(http: web.Request) -> web.Response:
            if not shows_key(http.headers, self._secret):
                raise web.HTTPUnauthorized
            try:
                answer = await call(self._codec.unpack(await http.read()))
            except (BadRecord, Problem, ValueError, KeyError, TypeError) as error:
                return web.Response(status=400, text=f"{type(error).__name__}: {error}")
            return web.Response(body=await asyncio.to_thread(self._codec.pack, answer, "an answer"))

        return handle

    async def _open(self, body: dict[str, Any]) -> Any:
        session = self._sessions.open(Opening(**body)).session
        return {"turns": len(session.tree.turns), "refusal": session.template.refusal if session.template else None}

    async def _close(self, body: dict[str, Any]) -> Any:
        key, problem = body["key"], Problem(Kind(body["kind"]), body["message"])
        closed = await self._sessions.close(key, problem)
        await self._listeners.close(key)
        record = await asyncio.to_thread(closed.session.to_record) if body["collect"] else None
        return {"record": record, "failure": closed.failure, "warning": self._sessions.warning}

    async def _turns(self, body: dict[str, Any]) -> Any:
        session = self._sessions.find(body["key"]).session
        turns = list(session.tree.turns.values())
        said = session.messages(turns[-1]) if turns else []
        return {"messages": [message_record(message) for message in said], "counters": session.counters.to_dict()}

    async def _hold(self, body: dict[str, Any]) -> Any:
        await self._sessions.find(body["key"]).hold()

    async def _release(self, body: dict[str, Any]) -> Any:
        self._sessions.find(body["key"]).release()

    async def _engine(self, body: dict[str, Any]) -> Any:
        state, url = body["state"], body["url"]
        if state == "given up":
            self._pool.give_up(body["reason"])
        elif state == "added":
            self._pool.add(url, api_key=body["key"])
        elif state == "removed":
            await self._pool.remove(url)
        else:
            {"up": self._pool.set_up, "down": self._pool.set_down, "leaving": self._pool.leave}[state](url)

    async def _version(self, body: dict[str, Any]) -> Any:
        self._sessions.version = body["version"]

    async def _stats(self, body: dict[str, Any]) -> Any:
        return {"open": len(self._sessions), "opened": self._sessions.opened}


def _live_calls(door: Door) -> dict[str, Call]:
    """What the driver asks of a live service."""

    async def take(body: dict[str, Any]) -> Any:
        return await door.take(int(body["slot"]))

    async def taken(body: dict[str, Any]) -> Any:
        return door.store.taken()

    async def forget(body: dict[str, Any]) -> Any:
        await door.store.forget(str(body["id"]))

    async def recorded(body: dict[str, Any]) -> Any:
        await door.store.forget_slot(int(body["slot"]))

    async def stats(body: dict[str, Any]) -> Any:
        return door.stats()

    return {
        "live_take": take,
        "live_taken": taken,
        "live_forget": forget,
        "live_recorded": recorded,
        "live_stats": stats,
    }
