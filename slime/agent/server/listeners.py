"""Listening sockets that others opened, for example inside a sandbox that has no network but that one, and handed over.

A connection to `listeners.sock` brings one descriptor and a JSON line with the secret and the key of the session that
it is for; it is answered with "ok". The endpoints accept there until the session is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket

from aiohttp import web

from slime.cluster.http_server import Connections

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
