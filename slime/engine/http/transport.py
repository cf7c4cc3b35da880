"""HTTP transport to one engine: sessions, deadlines, retries and errors of single calls.

Invariants: every call has a deadline that covers connecting, retrying and reading the response; every failure is an
`EngineError` that names the engine, the call and (for timeouts) the deadline; this module resends a request only if it
certainly never reached the engine.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import aiohttp

from slime.cluster.watchdog import log_graph, state_of, waiting
from slime.engine.http.blocking import authorization
from slime.engine.http.codec import parse_json, request_body
from slime.engine.http.errors import (
    EngineError,
    EngineFailed,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from slime.engine.http.protocol import error_message, quote
from slime.storage.json_types import JsonObject

CONNECT_TIMEOUT_S = 30.0
FIRST_BACKOFF_S = 0.1
LONG_RESPONSE_BYTES = 65536
"""About 1500 tokens: a response of this size or more is parsed in a thread."""
T = TypeVar("T")


class EngineTransport:
    """Connections to one engine, one HTTP session for each event loop, and single calls over them."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 3600.0,
        control_timeout_s: float = 120.0,
        connect_retries: int = 4,
        api_key: str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.control_timeout_s = control_timeout_s
        self.connect_retries = connect_retries
        self.api_key = api_key
        self.sampled_at = 0.0  # when tokens were received last (time.monotonic)
        self._reader: ThreadPoolExecutor | None = None
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            weakref.WeakKeyDictionary()
        )

    # -- sessions -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(
        self, method: str, call: str, *, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The raw, unread response of a call (for proxies); connection errors raise `EngineUnreachable`.

        This is the only call without a deadline: a proxy forwards a response as long as its client is connected. The
        engine's key replaces the authorization header of the client.
        """
        if self.api_key is not None and headers is not None:
            headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        try:
            async with self.session().request(method, self.base_url + call, data=data, headers=headers) as response:
                yield response
        except aiohttp.ClientError as error:
            raise self._unreachable(call, error) from error

    def session(self) -> aiohttp.ClientSession:
        """HTTP session of the running event loop."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = aiohttp.ClientSession(
                headers=authorization(self.api_key),
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            )
            self._sessions[loop] = session
        return session

    async def aclose(self) -> None:
        """Close the session of the running event loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()
        if not self._sessions and self._reader is not None:
            self._reader.shutdown(wait=False)
            self._reader = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- one call -----------------------------------------------------------------------------------------------

    async def _healthy(self, call: str, timeout_s: float | None) -> bool:
        try:
            await self._control("GET", call, None, timeout_s)
        except EngineFailed:
            return False
        return True

    async def _control(
        self, method: Literal["GET", "POST"], call: str, body: JsonObject | None, timeout_s: float | None
    ) -> None:
        deadline_s = self.control_timeout_s if timeout_s is None else timeout_s
        await self._body(method, call, body, deadline_s=deadline_s)

    async def _control_json(
        self, method: Literal["GET", "POST"], call: str, body: JsonObject | None, timeout_s: float | None
    ) -> JsonObject:
        deadline_s = self.control_timeout_s if timeout_s is None else timeout_s
        answer = self._parsed(call, await self._body(method, call, body, deadline_s=deadline_s))
        if not isinstance(answer, dict):
            raise EngineProtocolError(self.base_url, call, f"gave an answer that is not an object: {quote(answer)}")
        if answer.get("success") is False:
            raise EngineRejected(self.base_url, call, 200, str(answer.get("message", quote(answer))))
        return answer

    def _parsed(self, call: str, body: bytes) -> Any:
        try:
            return parse_json(body)
        except ValueError as error:
            text = body.decode(errors="replace")
            raise EngineProtocolError(self.base_url, call, f"gave an answer that is not JSON: {quote(text)}") from error

    async def _off_loop(self, read: Callable[[bytes], T], body: bytes) -> T:
        """Apply `read` to a response; a long response is read in a thread, so that the loop is not blocked."""
        if len(body) < LONG_RESPONSE_BYTES:
            return read(body)
        return await self._in_reader(partial(read, body))

    async def _in_reader(self, read: Callable[[], T]) -> T:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="engine-answers")
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    async def _body(
        self,
        method: str,
        call: str,
        body: JsonObject | None,
        *,
        deadline_s: float,
        flag: str | None = None,
        headers: dict[str, str] | None = None,
        connect_retries: int = 0,
    ) -> bytes:
        data, own = None, dict(headers or {})
        if body is not None:
            data = request_body(body)
            own.setdefault("Content-Type", "application/json")
        async with self._deadline(call, deadline_s, flag):
            for attempt in range(connect_retries + 1):
                try:
                    async with self.session().request(method, self.base_url + call, data=data, headers=own) as response:
                        answer, status = await response.read(), response.status
                except aiohttp.ClientError as error:
                    unreachable = self._unreachable(call, error)
                    if unreachable.accepted or attempt == connect_retries:
                        raise unreachable from error
                    await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
                    continue
                if status != 200:
                    raise self._refusal(call, status, answer.decode(errors="replace"))
                return answer
        raise AssertionError("unreachable: the last attempt returns or raises")

    @asynccontextmanager
    async def _deadline(self, call: str, deadline_s: float, flag: str | None) -> AsyncIterator[None]:
        """Register a wait for this engine; after the deadline the body is cancelled and `EngineTimeout` is raised."""
        with waiting(f"engine {self.base_url}", f"to answer {call}", timeout_s=deadline_s, flag=flag) as wait:
            try:
                async with asyncio.timeout(deadline_s):
                    yield
            except TimeoutError as error:
                state = state_of(self.base_url)
                timeout = EngineTimeout(self.base_url, call, deadline_s, flag=wait.flag, state=state)
                await log_graph(wait, str(timeout))  # once in the log, also if thousands of requests time out together
                raise timeout from error

    def _refusal(self, call: str, status: int, text: str) -> EngineError:
        later = status >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS
        kind = EngineFailed if later else EngineRejected
        return kind(self.base_url, call, status, error_message(text))

    def _unreachable(self, call: str, error: aiohttp.ClientError) -> EngineUnreachable:
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return EngineUnreachable(self.base_url, call, f"could not connect ({error})", accepted=False)
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return EngineUnreachable(
            self.base_url, call, f"lost its connection before the answer was complete ({cause})", accepted=True
        )
