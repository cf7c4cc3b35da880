"""Accepts connections for the endpoints, on sockets of our own and on those that sandboxes hand over.

Invariant: at most `most` connections are open, whatever connects; a client with a session's key finds room as long as
others are idle, since the oldest connection that never showed a key ends first, then one of the session that has most.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

_BACKLOG = 1024
_OTHER_DESCRIPTORS = 256
_MOST = 4096
_PAUSE_S = 0.1

logger = logging.getLogger(__name__)


def most_connections() -> int:
    """How many connections the limit of open files allows, where each may need a second one to an engine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MOST + _OTHER_DESCRIPTORS
    soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(16, (soft - _OTHER_DESCRIPTORS) // 2)


class Connections:
    """The open connections of a server; `serving` marks those with a request that has a session's key."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._keys: WeakKeyDictionary[asyncio.BaseTransport, str] = WeakKeyDictionary()
        self._busy: Counter[asyncio.BaseTransport] = Counter()
        self._accepting: dict[int, tuple[socket.socket, asyncio.Task[None]]] = {}
        self.refused = 0

    @contextmanager
    def serving(self, transport: asyncio.BaseTransport | None, key: str) -> Iterator[None]:
        """While a request of this session is being answered."""
        if transport is None:
            yield
            return
        self._keys[transport] = key
        self._busy[transport] += 1
        try:
            yield
        finally:
            self._busy[transport] -= 1
            if not self._busy[transport]:
                del self._busy[transport]

    def accept_on(self, listening: socket.socket, server: web.Server) -> None:
        """Accept on a listening socket until `stop`."""
        listening.setblocking(False)
        task = asyncio.create_task(self._accept(listening, server))
        self._accepting[listening.fileno()] = listening, task

    async def stop(self, listening: socket.socket) -> None:
        """Accept no more on this socket, and close it."""
        _, task = self._accepting.pop(listening.fileno())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listening.close()

    async def aclose(self) -> None:
        """Accept no more."""
        for listening, _ in list(self._accepting.values()):
            await self.stop(listening)

    async def _accept(self, listening: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                logger.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if not self._make_room(server):
                self.refused += 1
                logger.warning("all %d connections are in use: a further one was closed", self.most)
                connection.close()
                continue
            try:
                await loop.connect_accepted_socket(server, connection)
            except OSError as error:
                logger.warning("a connection was lost at once: %s", error)
                connection.close()

    def _make_room(self, server: web.Server) -> bool:
        """Whether one more connection is allowed, after closing an idle one if that takes it."""
        live = [
            (transport, handler)
            for handler in server.connections
            if (transport := handler.transport) is not None and not transport.is_closing()
        ]
        if len(live) < self.most:
            return True
        idle = [(transport, handler) for transport, handler in live if transport not in self._busy]
        if not idle:
            return False
        by_key = Counter(self._keys.get(transport) for transport, _ in idle)
        group = None if None in by_key else by_key.most_common(1)[0][0]
        chosen: RequestHandler = next(one for transport, one in idle if self._keys.get(transport) == group)
        chosen.force_close()
        return True


async def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of a host, on one port (0: a free one); raises `OSError`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            one = socket.socket(family, socket.SOCK_STREAM)
            bound.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            one.listen(_BACKLOG)
            port = one.getsockname()[1]
    except BaseException:
        for one in bound:
            one.close()
        raise
    return bound


def bound_file(path: Path) -> socket.socket:
    """A listening socket at a path."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.bind(str(path))
    one.listen(_BACKLOG)
    return one
