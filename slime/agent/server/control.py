"""Control calls of the driver to an agent server: it opens, holds and collects sessions, and reports engine changes.

`ControlApp` has a method for each call; `RemoteServer` makes it by its name. The server also adopts listening sockets
that others opened, for example inside a sandbox without a network. A connection to `listeners.sock` brings one
descriptor and a JSON line with the secret and the key of its session; it is answered with "ok". The endpoints accept
connections on the socket until the session is closed.

Invariant: every call needs the secret. Bodies are encoded like the journal (`Codec`), so arrays arrive unchanged.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from slime.agent.server.dialects import Kind, Problem
from slime.agent.server.online_intake import LiveConversations
from slime.agent.server.sessions import Sessions
from slime.agent.server.settings import AGENTS_SOCKET, CONTROL_SOCKET, LISTENERS_SOCKET, Opening
from slime.agent.session.records import BadRecord, message_record
from slime.cluster.http_checks import carries_key
from slime.cluster.http_server import Connections
from slime.data.buffer.codec import Codec
from slime.engine.http.blocking import authorization
from slime.engine.http.pool import EnginePool
from slime.storage.json_types import JsonMapping

CALL_TIMEOUT_S = 120.0
MOST_BODY_BYTES = 1 << 30
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


class ControlApp:
    """The application behind `control.sock`: each path is a method, called with the arguments in the body."""

    def __init__(
        self,
        sessions: Sessions,
        pool: EnginePool,
        listeners: Listeners,
        secret: str,
        door: LiveConversations | None = None,
    ) -> None:
        self._sessions, self._pool, self._listeners, self._secret = sessions, pool, listeners, secret
        self._codec = Codec()
        self.app = web.Application(client_max_size=MOST_BODY_BYTES)
        named = (self.open, self.close, self.turns, self.hold, self.release, self.engine, self.version, self.stats)
        calls: dict[str, Callable[..., object]] = {call.__name__: call for call in named}
        if door is not None:
            store = door.store
            calls |= {"live_take": door.take, "live_taken": store.taken, "live_stats": door.stats}
            calls |= {"live_forget": store.forget, "live_recorded": store.forget_slot}
        for name, call in calls.items():
            self.app.router.add_post(f"/{name}", partial(self._answer, call))

    async def _answer(self, call: Callable[..., object], http: web.Request) -> web.Response:
        if not carries_key(http.headers, self._secret):
            raise web.HTTPUnauthorized
        try:
            answer = call(**self._codec.unpack(await http.read()))
            if isinstance(answer, Awaitable):
                answer = await answer
        except (BadRecord, Problem, ValueError, KeyError, TypeError) as error:
            return web.Response(status=400, text=f"{type(error).__name__}: {error}")
        return web.Response(body=await asyncio.to_thread(self._codec.pack, answer, "an answer"))

    async def open(self, **opening: Any) -> object:
        """Open a session (`Opening`); returns its number of `turns` and, if it cannot be continued, the `refusal`."""
        session = self._sessions.open(Opening(**opening)).session
        return {"turns": len(session.tree.turns), "refusal": session.template.refusal if session.template else None}

    async def close(self, key: str, kind: str, message: str, collect: bool) -> object:
        """Close a session; `record` is the session (`Session.to_record`), or None if its turns are discarded.

        `failure` is the last error of an engine, `warning` is for the user of the run.
        """
        closed = await self._sessions.close(key, Problem(Kind(kind), message))
        await self._listeners.close(key)
        record = await asyncio.to_thread(closed.session.to_record) if collect else None
        return {"record": record, "failure": closed.failure, "warning": self._sessions.warning}

    async def turns(self, key: str) -> object:
        """The `messages` up to the last turn, and the session's `counters`."""
        session = self._sessions.find(key).session
        recorded = list(session.tree.turns.values())
        messages = session.messages(recorded[-1]) if recorded else []
        return {"messages": list(map(message_record, messages)), "counters": session.counters.to_dict()}

    async def hold(self, key: str) -> None:
        """Hold a session: when this returns, none of its requests is at an engine until `release`."""
        await self._sessions.find(key).hold()

    async def release(self, key: str) -> None:
        """Let a held session continue."""
        self._sessions.find(key).release()

    async def engine(self, url: str, state: str, reason: str, key: str | None) -> None:
        """The state of an engine (`EnginePool.when_changed`); a new one may require a key."""
        if state == "given up":
            self._pool.give_up(reason)
        elif state == "added":
            self._pool.add(url, api_key=key)
        elif state == "removed":
            await self._pool.remove(url)
        else:
            {"up": self._pool.set_up, "down": self._pool.set_down, "leaving": self._pool.leave}[state](url)

    async def version(self, version: str | None) -> None:
        """The version of the weights that all engines have."""
        self._sessions.version = version

    async def stats(self) -> object:
        return {"open": len(self._sessions), "opened": self._sessions.opened}


class AgentServerFailed(Exception):
    """The agent server died, does not answer, or refuses a call."""


class RemoteServer:
    """The driver's client of the control calls; `addresses` is the server's report of being ready."""

    def __init__(self, addresses: JsonMapping, secret: str) -> None:
        folder = Path(addresses["folder"])
        self.host, self.port, self.model = str(addresses["host"]), int(addresses["port"]), str(addresses["model"])
        self.agents_socket = str(folder / AGENTS_SOCKET)
        self._listeners, self._secret = str(folder / LISTENERS_SOCKET), secret
        self._codec = Codec()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(folder / CONTROL_SOCKET), limit=0),
            headers=authorization(secret),
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
        )

    @property
    def url(self) -> str:
        """The URL of the endpoints for agents on this machine, without a trailing slash."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def call(self, name: str, **arguments: object) -> Any:
        """Make one of the calls of `ControlApp` and return its answer."""
        packed = self._codec.pack(arguments, name)
        try:
            async with self._http.post(f"http://agent-server/{name}", data=packed) as response:
                content = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise AgentServerFailed(f"the agent server did not answer: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise AgentServerFailed(f"the agent server refused {name}: {content.decode(errors='replace')}")
        return self._codec.unpack(content)

    async def accept_on(self, key: str, listener: socket.socket) -> None:
        """Have the endpoints accept on a listening socket too, until the session is closed."""

        def hand_over() -> bytes:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_HANDOVER_TIMEOUT_S)
                connection.connect(self._listeners)
                line = json.dumps({"secret": self._secret, "key": key}).encode()
                socket.send_fds(connection, [line], [listener.fileno()])
                return connection.recv(64)

        try:
            answer = await asyncio.to_thread(hand_over)
        except OSError as error:
            raise AgentServerFailed(f"the agent server did not take a socket: {error}") from error
        if answer != b"ok":
            raise AgentServerFailed(f"the agent server did not take a socket: {answer!r}")

    async def aclose(self) -> None:
        await self._http.close()
