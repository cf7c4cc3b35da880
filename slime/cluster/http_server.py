"""Accepts the connections of an HTTP server up to a limit, on any number of listening sockets; limits its log lines.

Invariant: at most `most` connections are open. While there are idle connections, a new one is accepted: the oldest
connection without a served request is closed first, then an idle one of the key with the most idle connections.
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
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

BACKLOG = 2048
"""Connections that wait to be accepted; the kernel's net.core.somaxconn may lower it."""
_OTHER_DESCRIPTORS = 256
_MAX_OPENING = 256
_PAUSE_S = 0.1

logger = logging.getLogger(__name__)


def most_connections(wanted: int, *, descriptors_each: int) -> int:
    """Raise the soft limit of open files and return the number of connections it allows, at most `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = descriptors_each * wanted + _OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        except (OSError, ValueError):  # the system has a limit of its own below the hard one
            allowed = soft
    return max(16, (allowed - _OTHER_DESCRIPTORS) // descriptors_each)


class Connections:
    """The open connections of a server; `serving` marks those that have a request in flight, with its key."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._keys: WeakKeyDictionary[asyncio.BaseTransport, str] = WeakKeyDictionary()
        self._busy: Counter[asyncio.BaseTransport] = Counter()
        self._accepting: dict[int, tuple[socket.socket, asyncio.Task[None]]] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self.refused = 0

    @web.middleware
    async def served(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware that marks connections as busy under one key; earlier middleware may reject requests before it."""
        with self.serving(request.transport, ""):
            return await handler(request)

    @contextmanager
    def serving(self, transport: asyncio.BaseTransport | None, key: str) -> Iterator[None]:
        """Mark a connection as busy with a request of this key while the body runs."""
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
        listening.setblocking(False)
        task = asyncio.create_task(self._accept(listening, server))
        self._accepting[listening.fileno()] = listening, task

    async def stop(self, listening: socket.socket) -> None:
        _, task = self._accepting.pop(listening.fileno())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listening.close()

    async def aclose(self) -> None:
        """Stop accepting on all sockets and wait for connections that are being opened."""
        for listening, _ in list(self._accepting.values()):
            await self.stop(listening)
        await asyncio.gather(*self._opening)

    async def _accept(self, listening: socket.socket, server: web.Server) -> None:
        """Accept connections; open them concurrently, since each takes several iterations of a busy event loop."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                has_room = await self._make_room(server)
            except BaseException:
                connection.close()
                raise
            if has_room:
                opening = asyncio.create_task(_open(connection, server))
                self._opening.add(opening)
                opening.add_done_callback(self._opening.discard)
            else:
                self.refused += 1
                logger.warning("closed a new connection: all %d are in use", self.most)
                connection.close()
                await asyncio.sleep(0)

    async def _make_room(self, server: web.Server) -> bool:
        """Close an idle connection if the limit is reached; return True if one more is allowed."""
        if self._opening and len(self._opening) + len(server.connections) >= self.most:
            await asyncio.wait(self._opening)
        elif len(self._opening) >= _MAX_OPENING:
            await asyncio.wait(self._opening, return_when=asyncio.FIRST_COMPLETED)
        if len(self._opening) + len(server.connections) < self.most:
            return True
        live = [
            (transport, handler)
            for handler in server.connections
            if (transport := handler.transport) is not None and not transport.is_closing()
        ]
        if len(self._opening) + len(live) < self.most:
            return True
        idle = [(transport, handler) for transport, handler in live if transport not in self._busy]
        if not idle:
            return False
        by_key = Counter(self._keys.get(transport) for transport, _ in idle)
        group = None if None in by_key else by_key.most_common(1)[0][0]
        chosen: RequestHandler = next(one for transport, one in idle if self._keys.get(transport) == group)
        chosen.force_close()
        return True


async def _open(connection: socket.socket, server: web.Server) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(server, connection)
    except OSError as error:
        logger.warning("a new connection was lost: %s", error)
        connection.close()


async def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Open listening sockets on every address of a host, on one port (0: a free one); raises `OSError`."""
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
            one.listen(BACKLOG)
            port = one.getsockname()[1]
    except BaseException:
        for one in bound:
            one.close()
        raise
    return bound


def bind_unix_socket(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.bind(str(path))
    one.listen(BACKLOG)
    return one


class ClientLogLimit(logging.Filter):
    """Limits what clients of an HTTP server can make it log; a filter for handlers or loggers.

    A message passes `MOST` times in `PERIOD_S`; the next one after that says how many were dropped. A request that is
    not valid HTTP is its client's error: one line, no traceback.
    """

    MOST, PERIOD_S = 20, 10.0

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            record.msg = "a client sent an invalid HTTP request: %s"
            record.args = (record.exc_info[1].message.split("\n")[0],)
            record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
        kind = record.name, record.levelno, str(record.msg)
        if len(self._seen) > 1000:
            self._seen.clear()
        begun, count = self._seen.get(kind, (record.created, 0))
        if record.created - begun >= self.PERIOD_S:
            if count > self.MOST:
                record.msg = f"{record.getMessage()} ({count - self.MOST} more of this kind were not logged)"
                record.args = None
            begun, count = record.created, 0
        self._seen[kind] = begun, count + 1
        return count < self.MOST
