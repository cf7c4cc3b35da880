"""A forwarding server in front of several engines, for plugin code that posts to one URL by itself.

It forwards and decides nothing else: bodies, statuses and streams pass through byte by byte, requests that carry the
same ``X-SMG-Routing-Key`` reach the same engine, others the least loaded one. It lives in the event loop that starts
it and uses that loop's engine pool.
"""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from slime.cluster.http_checks import guard
from slime.cluster.http_server import ClientNoise, Connections, bound_sockets, most_connections
from slime.engine.http.errors import EngineError
from slime.engine.http.pool import EnginePool

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
MAX_BODY_BYTES = 1 << 30
MOST_CONNECTIONS = 65536
_NOISY = ("aiohttp.server", "slime.cluster.http_server")
"""Loggers of what clients do; the other logs of the driver, or of `slime serve`, stay as they are."""
# Headers of one connection, which must not travel to the next one (RFC 9110, 7.6.1), and those aiohttp writes itself.
_NOT_FORWARDED = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "content-encoding",
        "accept-encoding",
    }
)


class Router:
    """``POST /generate``, ``/v1/*`` forwarded over the pool; ``GET /workers`` and ``GET /health`` answered here.

    It shows the engines their key, so requests must come from this machine, or show `key`. Invariant: no request
    reaches another path of an engine, whose control routes have the same key.
    """

    def __init__(self, pool: EnginePool, *, key: str | None = None) -> None:
        self._pool = pool
        self._runner: web.AppRunner | None = None
        self._noise = ClientNoise()
        self._connections = Connections(most_connections(MOST_CONNECTIONS, descriptors_each=2))  # one more to an engine
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard(key), self._connections.served])
        self.app.router.add_post("/generate", self._forward)
        self.app.router.add_route("*", "/v1/{rest:.*}", self._forward)
        self.app.router.add_get("/workers", self._workers)
        self.app.router.add_get("/health", self._health)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Listen in the running event loop; returns the address (port 0 takes a free one)."""
        self._runner = web.AppRunner(self.app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        assert self._runner.server is not None
        for name in _NOISY:
            logging.getLogger(name).addFilter(self._noise)
        bound = await bound_sockets(host, port)
        for listening in bound:
            self._connections.accept_on(listening, self._runner.server)
        bound_host, bound_port = bound[0].getsockname()[:2]
        return bound_host, bound_port

    async def aclose(self) -> None:
        """Stop listening; requests in flight are cut after a second."""
        await self._connections.aclose()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        for name in _NOISY:
            logging.getLogger(name).removeFilter(self._noise)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if _has_dot_segments(request.path):
            return _error(404, f"{request.method} {request.path} is not served here: send the path without . and ..")
        body = await request.read()
        headers = _forwarded(request.headers)
        key = request.headers.get(ROUTING_KEY_HEADER)
        response: web.StreamResponse | None = None
        try:
            async with self._pool.open(
                request.method, request.path_qs, key, data=body or None, headers=headers
            ) as upstream:
                response = web.StreamResponse(status=upstream.status, headers=_forwarded(upstream.headers))
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
        except EngineError as error:
            if response is None:
                return _error(502, str(error))
            if request.transport is not None:  # the answer is half sent: breaking it off is the only honest end
                request.transport.abort()
            return response
        await response.write_eof()
        return response

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": str(i), "url": url} for i, url in enumerate(self._pool.urls)]})

    async def _health(self, request: web.Request) -> web.Response:
        async def healthy(client_index: int) -> bool:
            try:
                return await self._pool.clients[client_index].health(timeout_s=5.0)
            except EngineError:
                return False

        if any(await asyncio.gather(*(healthy(i) for i in range(len(self._pool))))):
            return web.Response()
        return _error(503, f"no engine answers: {', '.join(self._pool.urls)}")


def _has_dot_segments(path: str) -> bool:
    """Whether clients and servers further on, which may decode the path once more, could resolve it to another one."""
    return not {".", ".."}.isdisjoint(unquote(path).split("/"))


def _forwarded(headers: aiohttp.typedefs.LooseHeaders) -> dict[str, str]:
    return {str(name): str(value) for name, value in dict(headers).items() if str(name).lower() not in _NOT_FORWARDED}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
