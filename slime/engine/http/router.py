"""Forwarding HTTP server in front of several engines, for plugin code that posts to one URL.

It only forwards: bodies, statuses and streams pass through unchanged, requests with the same ``X-SMG-Routing-Key``
reach the same engine, others the least loaded one. It runs in the event loop that starts it and uses that loop's engine
pool.
"""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from slime.cluster.http_checks import guard
from slime.cluster.http_server import ClientLogLimit, Connections, bind_sockets, most_connections
from slime.engine.http.errors import EngineError
from slime.engine.http.pool import EnginePool

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
MAX_BODY_BYTES = 1 << 30
MOST_CONNECTIONS = 65536
_CLIENT_LOGGERS = ("aiohttp.server", "slime.cluster.http_server")
"""Loggers of client errors, which are filtered; other logs of the driver, or of `slime serve`, are not affected."""
# Hop-by-hop headers, which must not be forwarded (RFC 9110, 7.6.1), and those that aiohttp writes itself.
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
    """Forwards ``POST /generate`` and ``/v1/*`` to the pool; answers ``GET /workers`` and ``GET /health`` itself.

    It adds the engines' key to each request, so clients must be on this machine or send `key`. Invariant: no request
    reaches another path of an engine, because the engine's control routes have the same key.
    """

    def __init__(self, pool: EnginePool, *, key: str | None = None) -> None:
        self._pool = pool
        self._runner: web.AppRunner | None = None
        self._noise = ClientLogLimit()
        self._connections = Connections(most_connections(MOST_CONNECTIONS, descriptors_each=2))  # one more to an engine
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard(key), self._connections.served])
        self.app.router.add_post("/generate", self._forward)
        self.app.router.add_route("*", "/v1/{rest:.*}", self._forward)
        self.app.router.add_get("/workers", self._workers)
        self.app.router.add_get("/health", self._health)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Listen in the running event loop; returns the address (port 0 selects a free port)."""
        self._runner = web.AppRunner(self.app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        assert self._runner.server is not None
        for name in _CLIENT_LOGGERS:
            logging.getLogger(name).addFilter(self._noise)
        bound = await bind_sockets(host, port)
        for listening in bound:
            self._connections.accept_on(listening, self._runner.server)
        bound_host, bound_port = bound[0].getsockname()[:2]
        return bound_host, bound_port

    async def aclose(self) -> None:
        """Stop listening; requests in flight are cancelled after one second."""
        await self._connections.aclose()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        for name in _CLIENT_LOGGERS:
            logging.getLogger(name).removeFilter(self._noise)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        # an engine may decode the path once again, and resolve dot segments to one of its control routes
        if not {".", ".."}.isdisjoint(unquote(request.path).split("/")):
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
            if request.transport is not None:  # part of the response is sent: only a broken connection shows the error
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


def _forwarded(headers: aiohttp.typedefs.LooseHeaders) -> dict[str, str]:
    return {str(name): str(value) for name, value in dict(headers).items() if str(name).lower() not in _NOT_FORWARDED}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
