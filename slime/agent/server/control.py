"""What the driver tells the process of the endpoints: sessions opened, held, collected; engines that come and go.

Invariant: only who has the secret is heard. Bodies are the journal's bytes (`Codec`), so arrays arrive as they were.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from slime.agent.online.intake import Door
from slime.agent.server.dialects import Kind, Problem
from slime.agent.server.sessions import Sessions
from slime.agent.server.settings import Opening
from slime.agent.session.records import BadRecord, message_record
from slime.cluster.http_checks import shows_key
from slime.cluster.http_server import Connections
from slime.data.buffer.codec import Codec
from slime.engine.http.pool import EnginePool

# Listening sockets that others opened, for example inside a sandbox that has no network but that one, and handed over.
#
# A connection to `listeners.sock` brings one descriptor and a JSON line with the secret and the key of the session
# that it is for; it is answered with "ok". The endpoints accept there until the session is closed.

_MOST_LINE = 4096
_PATIENCE_S = 10.0

logger = logging.getLogger(__name__)


class Listeners:
    """Adopts sockets for the endpoints of `runner`."""

    def __init__(self, runner: web.AppRunner, connections: Connections, path: str, secret: str) -> None:
        self._runner, self._connections, self._path, self._secret = runner, connections, path, secret
        self._adopted: dict[str, list[socket.socket]] = {}
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take sockets from now on."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self._path)
        self._socket.listen(64)
        self._socket.setblocking(False)
        self._serving = asyncio.create_task(self._serve(self._socket))

    async def close(self, key: str) -> None:
        """Accept no more on the sockets of a session."""
        for listening in self._adopted.pop(key, ()):
            await self._connections.stop(listening)

    async def aclose(self) -> None:
        """Take no more sockets."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    async def _serve(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listening)
            with connection:
                try:
                    answer = await self._take(connection)
                    await asyncio.wait_for(loop.sock_sendall(connection, answer), _PATIENCE_S)
                except (OSError, TimeoutError) as error:
                    logger.warning("a socket was not handed over: %s", error)

    async def _take(self, connection: socket.socket) -> bytes:
        connection.settimeout(_PATIENCE_S)
        line, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, connection, _MOST_LINE, 1)
        connection.setblocking(False)
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        try:
            given = json.loads(line)
            key, secret = str(given["key"]), str(given["secret"])
        except (ValueError, KeyError, TypeError):
            key, secret = "", ""
        if not sockets or not hmac.compare_digest(secret.encode(), self._secret.encode()):
            for one in sockets:
                one.close()
            return b"refused"
        for one in sockets:
            assert self._runner.server is not None
            self._connections.accept_on(one, self._runner.server)
            self._adopted.setdefault(key, []).append(one)
        return b"ok"


async def hand_over(path: str, secret: str, key: str, listener: socket.socket) -> None:
    """Have the endpoints behind `path` accept on a listening socket for as long as a session lasts."""

    def hand() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PATIENCE_S)
            connection.connect(path)
            socket.send_fds(connection, [json.dumps({"secret": secret, "key": key}).encode()], [listener.fileno()])
            return connection.recv(64)

    answer = await asyncio.to_thread(hand)
    if answer != b"ok":
        raise ConnectionError(f"the agent server did not take the socket: {answer!r}")


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
