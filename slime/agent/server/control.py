"""The control interface of the agent server: the driver opens, holds and collects sessions, and reports engine changes.

It also adopts listening sockets that others opened, for example inside a sandbox without a network. A connection to
`listeners.sock` brings one descriptor and a JSON line with the secret and the key of its session; it is answered with
"ok". The endpoints accept connections on the socket until the session is closed.

Invariant: every call needs the secret. Bodies are encoded like the journal (`Codec`), so arrays arrive unchanged.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from slime.agent.server.dialects import Kind, Problem
from slime.agent.server.online_intake import LiveConversations
from slime.agent.server.sessions import Sessions
from slime.agent.server.settings import Opening
from slime.agent.session.records import BadRecord, message_record
from slime.cluster.http_checks import carries_key
from slime.cluster.http_server import Connections
from slime.data.buffer.codec import Codec
from slime.engine.http.pool import EnginePool
from slime.storage.json_types import JsonObject

_MOST_LINE = 4096
_HANDOVER_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class Listeners:
    """Adopts listening sockets for the endpoints of `runner`."""

    def __init__(self, runner: web.AppRunner, connections: Connections, path: str, secret: str) -> None:
        self._runner, self._connections, self._path, self._secret = runner, connections, path, secret
        self._adopted: dict[str, list[socket.socket]] = {}
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to adopt sockets."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self._path)
        self._socket.listen(64)
        self._socket.setblocking(False)
        self._serving = asyncio.create_task(self._serve(self._socket))

    async def close(self, key: str) -> None:
        """Stop accepting on the sockets of a session."""
        for listening in self._adopted.pop(key, ()):
            await self._connections.stop(listening)

    async def aclose(self) -> None:
        """Stop adopting sockets."""
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
                    connection.settimeout(_HANDOVER_TIMEOUT_S)
                    line, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, connection, _MOST_LINE, 1)
                    connection.setblocking(False)
                    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
                    try:
                        given = json.loads(line)
                        key, secret = str(given["key"]), str(given["secret"])
                    except (ValueError, KeyError, TypeError):
                        key, secret = "", ""
                    answer = b"refused"
                    if not sockets or not hmac.compare_digest(secret.encode(errors="replace"), self._secret.encode()):
                        for one in sockets:
                            one.close()
                    else:
                        for one in sockets:
                            assert self._runner.server is not None
                            self._connections.accept_on(one, self._runner.server)
                            self._adopted.setdefault(key, []).append(one)
                        answer = b"ok"
                    await asyncio.wait_for(loop.sock_sendall(connection, answer), _HANDOVER_TIMEOUT_S)
                except (OSError, TimeoutError) as error:
                    logger.warning("could not adopt a listening socket: %s", error)


async def send_listener(path: str, secret: str, key: str, listener: socket.socket) -> None:
    """Send a listening socket to the agent server behind `path`, which accepts on it until the session is closed."""

    def hand() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_HANDOVER_TIMEOUT_S)
            connection.connect(path)
            socket.send_fds(connection, [json.dumps({"secret": secret, "key": key}).encode()], [listener.fileno()])
            return connection.recv(64)

    answer = await asyncio.to_thread(hand)
    if answer != b"ok":
        raise ConnectionError(f"the agent server did not take the socket: {answer!r}")


MOST_BODY_BYTES = 1 << 30

ControlCall = Callable[[JsonObject], Awaitable[object]]


class ControlApp:
    """The application behind `control.sock`: each path is one call with named arguments."""

    def __init__(
        self,
        sessions: Sessions,
        pool: EnginePool,
        listeners: Listeners,
        secret: str,
        door: LiveConversations | None = None,
    ) -> None:
        self.app = web.Application(client_max_size=MOST_BODY_BYTES)
        calls = _run_calls(sessions, pool, listeners)
        if door is not None:
            calls |= _live_calls(door)
        codec = Codec()

        def handler(call: ControlCall) -> Callable[[web.Request], Awaitable[web.Response]]:
            async def handle(http: web.Request) -> web.Response:
                if not carries_key(http.headers, secret):
                    raise web.HTTPUnauthorized
                try:
                    answer = await call(codec.unpack(await http.read()))
                except (BadRecord, Problem, ValueError, KeyError, TypeError) as error:
                    return web.Response(status=400, text=f"{type(error).__name__}: {error}")
                return web.Response(body=await asyncio.to_thread(codec.pack, answer, "an answer"))

            return handle

        for name, call in calls.items():
            self.app.router.add_post(f"/{name}", handler(call))


def _run_calls(sessions: Sessions, pool: EnginePool, listeners: Listeners) -> dict[str, ControlCall]:
    """The calls of every run: sessions, engines and the version of their weights."""

    async def open_session(body: JsonObject) -> object:
        session = sessions.open(Opening(**body)).session
        return {"turns": len(session.tree.turns), "refusal": session.template.refusal if session.template else None}

    async def close(body: JsonObject) -> object:
        key, problem = body["key"], Problem(Kind(body["kind"]), body["message"])
        closed = await sessions.close(key, problem)
        await listeners.close(key)
        record = await asyncio.to_thread(closed.session.to_record) if body["collect"] else None
        return {"record": record, "failure": closed.failure, "warning": sessions.warning}

    async def turns(body: JsonObject) -> object:
        session = sessions.find(body["key"]).session
        recorded = list(session.tree.turns.values())
        messages = session.messages(recorded[-1]) if recorded else []
        records = [message_record(message) for message in messages]
        return {"messages": records, "counters": session.counters.to_dict()}

    async def hold(body: JsonObject) -> None:
        await sessions.find(body["key"]).hold()

    async def release(body: JsonObject) -> None:
        sessions.find(body["key"]).release()

    async def engine(body: JsonObject) -> None:
        state, url = body["state"], body["url"]
        if state == "given up":
            pool.give_up(body["reason"])
        elif state == "added":
            pool.add(url, api_key=body["key"])
        elif state == "removed":
            await pool.remove(url)
        else:
            {"up": pool.set_up, "down": pool.set_down, "leaving": pool.leave}[state](url)

    async def version(body: JsonObject) -> None:
        sessions.version = body["version"]

    async def stats(body: JsonObject) -> object:
        return {"open": len(sessions), "opened": sessions.opened}

    return {
        "open": open_session,
        "close": close,
        "turns": turns,
        "hold": hold,
        "release": release,
        "engine": engine,
        "version": version,
        "stats": stats,
    }


def _live_calls(door: LiveConversations) -> dict[str, ControlCall]:
    """The calls of a live service."""

    async def take(body: JsonObject) -> object:
        return await door.take(int(body["slot"]))

    async def taken(body: JsonObject) -> object:
        return door.store.taken()

    async def forget(body: JsonObject) -> None:
        await door.store.forget(str(body["id"]))

    async def recorded(body: JsonObject) -> None:
        await door.store.forget_slot(int(body["slot"]))

    async def stats(body: JsonObject) -> object:
        return door.stats()

    return {
        "live_take": take,
        "live_taken": taken,
        "live_forget": forget,
        "live_recorded": recorded,
        "live_stats": stats,
    }
