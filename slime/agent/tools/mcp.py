"""The tools of MCP servers, over stdio or HTTP. The only file that imports the package `mcp` (extra `agents`).

Invariants: a server that dies or hangs ends the calls that wait for it, each with its own outcome, and nothing else;
the next call opens a new connection. A connection is entered and left by one task, as the package requires.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from slime.agent.tools.tool import Tool, ToolFailure, ToolLimits, ToolOutcome
from slime.cluster.process import guarded
from slime.errors import UserError
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from mcp.types import Tool as ListedTool

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 10.0
MOST_PAGES = 100
_BAD_PARAMETERS = -32602
_CONNECTION_CLOSED = -32000

Connect = Callable[[IO[str]], AbstractAsyncContextManager[object]]
"""Opens the streams of a server; the file takes what the server writes to stderr."""


class McpServer:
    """One MCP server as a provider of tools, made with `McpServer.stdio` or `McpServer.http`.

    `tools` names the tools to offer (default: all), `prefix` is put before their names. Attempts share one connection
    unless `per_attempt` is set, for servers with a state (a browser, a shell).
    """

    def __init__(
        self,
        connect: Connect,
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
        self._shared: _ServerLink | None = None

    @classmethod
    def stdio(
        cls, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None, **options: Any
    ) -> McpServer:
        """Make a server that is started as a child process, with a minimal environment extended by `env`.

        The server is killed with this process, even if this process crashes.
        """
        mcp = _mcp()
        program, *arguments = guarded(command)
        wanted = mcp.StdioServerParameters(
            command=program, args=arguments, env=None if env is None else dict(env), cwd=cwd
        )
        return cls(lambda errors: mcp.stdio_client(wanted, errlog=errors), **{"name": " ".join(command), **options})

    @classmethod
    def http(cls, url: str, *, headers: Mapping[str, str] | None = None, **options: Any) -> McpServer:
        """Make a server that is running already (streamable HTTP)."""
        _mcp()
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        @asynccontextmanager
        async def connect(errors: IO[str]) -> AsyncIterator[object]:
            async with (
                create_mcp_http_client(headers=dict(headers or {})) as client,
                streamable_http_client(url, http_client=client) as streams,
            ):
                yield streams

        return cls(connect, **{"name": url, **options})

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[Tool]]:
        """Open the server's tools; starts the server or connects to it if that has not happened yet."""
        if self._per_attempt:
            link = _ServerLink(self.name, self._connect)
        elif self._shared is None:
            link = self._shared = _ServerLink(self.name, self._connect)
        else:
            link = self._shared
        try:
            listed = await link.tools()
            missing = set(self._wanted or ()) - {tool.name for tool in listed}
            if missing:
                there = ", ".join(tool.name for tool in listed) or "none"
                raise UserError(f"MCP server {self.name} has no tool {', '.join(sorted(missing))}; it has: {there}")
            yield [
                _McpTool(link, tool, self._prefix, self.limits)
                for tool in listed
                if self._wanted is None or tool.name in self._wanted
            ]
        finally:
            if self._per_attempt:
                await link.aclose()

    async def aclose(self) -> None:
        """Close the shared connection; a server that was started is stopped."""
        link, self._shared = self._shared, None
        if link is not None:
            await link.aclose()


class _McpTool:
    """One tool of an MCP server."""

    def __init__(self, link: _ServerLink, listed: ListedTool, prefix: str, limits: ToolLimits) -> None:
        self.name: str = prefix + listed.name
        self.limits = limits
        self._link, self._remote_name = link, listed.name
        function = {"name": self.name, "description": listed.description or "", "parameters": dict(listed.input_schema)}
        self.schema: JsonObject = {"type": "function", "function": function}

    async def call(self, arguments: JsonObject) -> str:
        return await self._link.call(self._remote_name, arguments)


class _ServerLink:
    """A server and its current connection, which is replaced after a failure."""

    def __init__(self, name: str, connect: Connect) -> None:
        self._name, self._connect = name, connect
        self._current: asyncio.Task[_Connection] | None = None
        self._listed: list[ListedTool] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._probes: set[asyncio.Task[None]] = set()

    async def tools(self) -> list[ListedTool]:
        """Return the tools that the server listed last, so that an attempt can begin while the server is down."""
        if self._listed is None:
            await self.connection()
        assert self._listed is not None
        return self._listed

    async def connection(self) -> _Connection:
        """Return the current connection, or a new one; a caller that is cancelled leaves it to the next call."""
        current = self._current
        if (
            current is not None
            and current.done()
            and (current.cancelled() or current.exception() is not None or current.result().is_over)
        ):
            self._close_in_background(current)
            self._current = None
        if self._current is None:
            self._current = asyncio.create_task(_Connection.opened(self._name, self._connect))
        connection = await asyncio.shield(self._current)
        self._listed = connection.tools
        return connection

    async def call(self, tool: str, arguments: JsonObject) -> str:
        """Call a tool and return the text of its answer; parts that are not text are named."""
        connection = await self.connection()
        try:
            answer = await connection.call(tool, arguments)
        except asyncio.CancelledError:  # the deadline of the call: check whether the server hangs
            probe = asyncio.create_task(connection.probe())
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)
            raise
        texts = [block.text if block.type == "text" else f"[{block.type} left out]" for block in answer.content]
        text = "\n".join(texts)
        if not texts and answer.structured_content is not None:
            text = json.dumps(answer.structured_content, ensure_ascii=False)
        if answer.is_error:
            raise ToolFailure(ToolOutcome.ERROR, text)
        return text

    async def aclose(self) -> None:
        for probe in self._probes:
            probe.cancel()
        current, self._current = self._current, None
        if current is not None:
            current.cancel()  # if it is still being opened
            await asyncio.wait({current})
            self._close_in_background(current)
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _close_in_background(self, opening: asyncio.Task[_Connection]) -> None:
        """Close a connection in the background, if it was opened."""
        if opening.cancelled() or opening.exception() is not None:
            return
        task = asyncio.create_task(opening.result().aclose())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


class _Connection:
    """One connection, held by its own task and closed by the first failure."""

    def __init__(self, name: str, connect: Connect) -> None:
        self._name = name
        self._client: Any = None
        self.tools: list[ListedTool] = []
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self._task = asyncio.create_task(self._hold(connect))

    @classmethod
    async def opened(cls, name: str, connect: Connect) -> _Connection:
        """Open a connection and wait until the server has listed its tools."""
        connection = cls(name, connect)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await connection._ready
        except (TimeoutError, asyncio.CancelledError) as error:
            await connection.aclose()
            if isinstance(error, asyncio.CancelledError):
                raise
            text = f"MCP server {name} did not list its tools within {START_TIMEOUT_S:g} s"
            raise ToolFailure(ToolOutcome.CRASHED, text) from error
        return connection

    @property
    def is_over(self) -> bool:
        return self._leave.is_set() or self._task.done()

    async def _hold(self, connect: Connect) -> None:
        """Keep the connection open until `_leave` is set or it fails."""
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            try:
                async with _mcp().Client(connect(errors), cache=None) as client:
                    cursor: str | None = None
                    listed: list[ListedTool] = []
                    for _ in range(MOST_PAGES):
                        page = await client.list_tools(cursor=cursor)
                        listed += page.tools
                        cursor = page.next_cursor
                        if not cursor:
                            break
                    self.tools = listed
                    self._client = client
                    if not self._ready.done():
                        self._ready.set_result(None)
                    await self._leave.wait()
            except Exception as error:  # noqa: BLE001 - any error of the server or the package ends this connection
                self._fail(error, errors)
            finally:
                self._leave.set()
                if not self._ready.done():
                    self._ready.cancel()

    def _fail(self, error: Exception, errors: IO[str]) -> None:
        """Report why the connection failed, with the last line of the server's stderr."""
        errors.seek(0, 2)
        errors.seek(max(0, errors.tell() - 2000))
        lines = errors.read().strip().splitlines()
        while isinstance(error, ExceptionGroup):  # the package's task groups wrap one error
            error = error.exceptions[0]
        said = f"; its last words: {lines[-1]}" if lines and lines[-1] else ""
        text = f"MCP server {self._name} cannot be used: {type(error).__name__}: {error}{said}"
        if self._ready.done():
            logger.warning("%s", text)
        else:
            self._ready.set_exception(ToolFailure(ToolOutcome.CRASHED, text))

    async def call(self, tool: str, arguments: JsonObject) -> CallToolResult:
        """Call a tool; raises `ToolFailure` when the server refuses the call, dies or closes the connection."""
        over = asyncio.create_task(self._leave.wait())
        request = asyncio.create_task(self._client.call_tool(tool, arguments))
        try:
            await asyncio.wait({over, request}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise ToolFailure(ToolOutcome.CRASHED, f"MCP server {self._name} closed the connection during the call")
            error = request.exception()
            if error is None:
                return request.result()
            code = error.code if isinstance(error, _mcp().MCPError) else None
            if code == _BAD_PARAMETERS:
                raise ToolFailure(ToolOutcome.BAD_ARGUMENTS, str(error)) from error
            if code is not None and code != _CONNECTION_CLOSED:
                raise ToolFailure(ToolOutcome.ERROR, str(error)) from error
            self._leave.set()
            text = f"MCP server {self._name} does not answer: {type(error).__name__}: {error}"
            raise ToolFailure(ToolOutcome.CRASHED, text) from error
        finally:
            over.cancel()
            request.cancel()

    async def probe(self) -> None:
        """Check that the server still answers; close the connection if it does not."""
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


def _mcp() -> ModuleType:
    try:
        import mcp
    except ImportError as error:
        raise UserError("MCP servers need the package mcp: pip install 'slime[agents]'") from error
    return mcp
