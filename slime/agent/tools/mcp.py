"""The tools of MCP servers, over stdio or HTTP. The only file that imports the package `mcp` (extra `agents`).

Invariant: a server that dies or hangs ends the calls that wait for it, each with its own outcome, and nothing else; the
next call finds a new connection. A connection is entered and left by one task, which the package demands.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import IO, Any

from slime.agent.tools.tool import Tool, ToolFailure, ToolLimits, ToolOutcome
from slime.cluster.process import guarded
from slime.errors import UserError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 10.0
MOST_PAGES = 100
_BAD_PARAMETERS = -32602
_CONNECTION_CLOSED = -32000


class McpServer:
    """One MCP server as a provider of tools. Make it with `McpServer.stdio` or `McpServer.http`.

    `tools` names those to offer (default: all), `prefix` goes before their names. Attempts share one connection unless
    `per_attempt` is set, for servers that keep a state (a browser, a shell).
    """

    def __init__(
        self,
        connect: Callable[[IO[str]], AbstractAsyncContextManager[Any]],
        *,
        name: str,
        tools: Sequence[str] | None = None,
        prefix: str = "",
        per_attempt: bool = False,
        timeout_s: float = 30.0,
        concurrency: int = 64,
        max_result_chars: int = 8192,
    ) -> None:
        self.name = name
        self.limits = ToolLimits(timeout_s, concurrency, max_result_chars)
        self._connect, self._wanted, self._prefix, self._per_attempt = connect, tools, prefix, per_attempt
        self._shared: _Link | None = None

    @classmethod
    def stdio(
        cls, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None, **options: Any
    ) -> McpServer:
        """A server that is started as a child process, with a minimal environment and what `env` adds to it.

        However this process ends, nothing of the server is left.
        """
        mcp = _mcp()
        program, *arguments = guarded(command)
        wanted = mcp.StdioServerParameters(
            command=program, args=arguments, env=None if env is None else dict(env), cwd=cwd
        )
        return cls(lambda errors: mcp.stdio_client(wanted, errlog=errors), **{"name": " ".join(command), **options})

    @classmethod
    def http(cls, url: str, *, headers: Mapping[str, str] | None = None, **options: Any) -> McpServer:
        """A server that runs already (streamable HTTP)."""
        _mcp()
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        @asynccontextmanager
        async def connect(errors: IO[str]) -> AsyncIterator[Any]:
            async with (
                create_mcp_http_client(headers=dict(headers or {})) as client,
                streamable_http_client(url, http_client=client) as streams,
            ):
                yield streams

        return cls(connect, **{"name": url, **options})

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """The server's tools; it is started or connected to if that has not happened yet."""
        link = _Link(self.name, self._connect) if self._per_attempt else self._shared_link()
        try:
            yield self._tools(link, await link.tools())
        finally:
            if self._per_attempt:
                await link.aclose()

    async def aclose(self) -> None:
        """Close the shared connection; a server that was started is ended."""
        link, self._shared = self._shared, None
        if link is not None:
            await link.aclose()

    def _shared_link(self) -> _Link:
        if self._shared is None:
            self._shared = _Link(self.name, self._connect)
        return self._shared

    def _tools(self, link: _Link, listed: Sequence[Any]) -> list[Tool]:
        missing = set(self._wanted or ()) - {tool.name for tool in listed}
        if missing:
            there = ", ".join(tool.name for tool in listed) or "none"
            raise UserError(f"MCP server {self.name} has no tool {', '.join(sorted(missing))}; it has: {there}")
        return [
            _McpTool(link, tool, self._prefix, self.limits)
            for tool in listed
            if self._wanted is None or tool.name in self._wanted
        ]


class _McpTool:
    def __init__(self, link: _Link, listed: Any, prefix: str, limits: ToolLimits) -> None:
        self.name: str = prefix + listed.name
        self.limits = limits
        self._link, self._remote_name = link, listed.name
        function = {"name": self.name, "description": listed.description or "", "parameters": dict(listed.input_schema)}
        self.schema: dict[str, Any] = {"type": "function", "function": function}

    async def call(self, arguments: dict[str, Any]) -> str:
        return await self._link.call(self._remote_name, arguments)


class _Link:
    """A server and the connection to it that works at the moment."""

    def __init__(self, name: str, connect: Callable[[IO[str]], AbstractAsyncContextManager[Any]]) -> None:
        self._name, self._connect = name, connect
        self._current: asyncio.Task[_Connection] | None = None
        self._listed: list[Any] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._probes: set[asyncio.Task[None]] = set()

    async def tools(self) -> list[Any]:
        """What the server said it has, when it was asked last: an attempt begins also while it is away."""
        if self._listed is None:
            await self.connection()
        assert self._listed is not None
        return self._listed

    async def connection(self) -> _Connection:
        """The one that works, or a new one. Who cannot wait for it any longer leaves it to the next call."""
        if self._current is not None and _is_over(self._current):
            self._part_with(self._current)
            self._current = None
        if self._current is None:
            self._current = asyncio.create_task(_Connection.opened(self._name, self._connect))
        connection = await asyncio.shield(self._current)
        self._listed = connection.tools
        return connection

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        connection = await self.connection()
        try:
            answer = await connection.call(tool, arguments)
        except asyncio.CancelledError:  # the deadline of the call: the server may hang
            self._look_after(connection)
            raise
        text = _text_of(answer)
        if answer.is_error:
            raise ToolFailure(ToolOutcome.ERROR, text)
        return text

    def _look_after(self, connection: _Connection) -> None:
        task = asyncio.create_task(connection.probe())
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def aclose(self) -> None:
        for probe in self._probes:
            probe.cancel()
        current, self._current = self._current, None
        if current is not None:
            current.cancel()  # where it is still on its way
            await asyncio.wait({current})
            self._part_with(current)
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _part_with(self, opening: asyncio.Task[_Connection]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            return
        task = asyncio.create_task(opening.result().aclose())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def _is_over(opening: asyncio.Task[_Connection]) -> bool:
    if not opening.done():
        return False
    return opening.cancelled() or opening.exception() is not None or opening.result().is_over


class _Connection:
    """One connection: held by a task of its own, over as soon as anything goes wrong with it."""

    def __init__(self, name: str, connect: Callable[[IO[str]], AbstractAsyncContextManager[Any]]) -> None:
        self._name = name
        self._client: Any = None
        self.tools: list[Any] = []
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self._task = asyncio.create_task(self._hold(connect))

    @classmethod
    async def opened(cls, name: str, connect: Callable[[IO[str]], AbstractAsyncContextManager[Any]]) -> _Connection:
        connection = cls(name, connect)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await connection._ready
        except (TimeoutError, asyncio.CancelledError) as error:
            await connection.aclose()
            if isinstance(error, asyncio.CancelledError):
                raise
            text = f"MCP server {name} did not say what it can do within {START_TIMEOUT_S:g} s"
            raise ToolFailure(ToolOutcome.CRASHED, text) from error
        return connection

    @property
    def is_over(self) -> bool:
        return self._leave.is_set() or self._task.done()

    async def _hold(self, connect: Callable[[IO[str]], AbstractAsyncContextManager[Any]]) -> None:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            try:
                async with _mcp().Client(connect(errors), cache=None) as client:
                    self.tools = await _all_tools(client)
                    self._client = client
                    if not self._ready.done():
                        self._ready.set_result(None)
                    await self._leave.wait()
            except Exception as error:  # noqa: BLE001 - whatever the server or the package raises ends this connection
                self._fail(error, _last_words(errors))
            finally:
                self._leave.set()
                if not self._ready.done():
                    self._ready.cancel()

    def _fail(self, error: Exception, last_words: str) -> None:
        while isinstance(error, ExceptionGroup):  # what the package's task groups make of one error
            error = error.exceptions[0]
        said = f"; its last words: {last_words}" if last_words else ""
        text = f"MCP server {self._name} cannot be used: {type(error).__name__}: {error}{said}"
        if self._ready.done():
            logger.warning("%s", text)
        else:
            self._ready.set_exception(ToolFailure(ToolOutcome.CRASHED, text))

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        over = asyncio.create_task(self._leave.wait())
        request = asyncio.create_task(self._client.call_tool(tool, arguments))
        try:
            await asyncio.wait({over, request}, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return self._answer(request)
            raise ToolFailure(ToolOutcome.CRASHED, f"MCP server {self._name} went away in the middle of the call")
        finally:
            over.cancel()
            request.cancel()

    def _answer(self, request: asyncio.Task[Any]) -> Any:
        error = request.exception()
        if error is None:
            return request.result()
        code = error.code if isinstance(error, _mcp().MCPError) else None
        if code == _BAD_PARAMETERS:
            raise ToolFailure(ToolOutcome.BAD_ARGUMENTS, str(error)) from error
        if code is not None and code != _CONNECTION_CLOSED:
            raise ToolFailure(ToolOutcome.ERROR, str(error)) from error
        self._leave.set()
        raise ToolFailure(
            ToolOutcome.CRASHED, f"MCP server {self._name} does not answer: {type(error).__name__}: {error}"
        ) from error

    async def probe(self) -> None:
        """Whether it still answers anything; if not, the connection is over."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._client.list_tools()
        except (Exception, asyncio.CancelledError) as error:
            logger.warning("MCP server %s does not answer any more (%s)", self._name, type(error).__name__)
            self._leave.set()
            if isinstance(error, asyncio.CancelledError):
                raise

    async def aclose(self) -> None:
        self._leave.set()
        _, late = await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_S)
        if late:
            self._task.cancel()
            await asyncio.wait({self._task})


async def _all_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _text_of(answer: Any) -> str:
    texts = [block.text if block.type == "text" else f"[{block.type} left out]" for block in answer.content]
    if not texts and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _last_words(errors: IO[str]) -> str:
    errors.seek(0, 2)
    errors.seek(max(0, errors.tell() - 2000))
    lines = errors.read().strip().splitlines()
    return lines[-1] if lines else ""


def _mcp() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise UserError("MCP servers need the package mcp: pip install 'slime[agents]'") from error
    return mcp
