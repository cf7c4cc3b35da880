"""Asynchronous HTTP client of one engine, and the pool over several.

Invariants: every call has a deadline that covers connecting, retrying and reading the answer; every failure is an
`EngineError` that names the engine, the call and (for timeouts) the deadline; a request is resent by this module only
when it certainly never reached the engine.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from slime.engine.errors import (
    EngineError,
    EngineFailed,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from slime.engine.protocol import GenerateResult, PauseMode, error_message, quote

__all__ = [
    "EngineClient",
    "EngineError",
    "EngineFailed",
    "EnginePool",
    "EngineProtocolError",
    "EngineRejected",
    "EngineTimeout",
    "EngineUnreachable",
    "GenerateResult",
    "PauseMode",
]

CONNECT_TIMEOUT_S = 30.0
FIRST_BACKOFF_S = 0.1


class EngineClient:
    """Calls one engine; safe to use from several event loops, each of which gets its own HTTP session.

    ``timeout_s`` is the deadline of a generation, ``control_timeout_s`` that of every other call; each method takes
    ``timeout_s`` to override its own. Close with `aclose` in each event loop that used the client.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 3600.0,
        control_timeout_s: float = 120.0,
        connect_retries: int = 4,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.control_timeout_s = control_timeout_s
        self.connect_retries = connect_retries
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            weakref.WeakKeyDictionary()
        )

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self, payload: dict[str, Any], *, headers: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """``POST /generate`` as is; returns the parsed answer. Refused connections are retried with backoff."""
        answer = await self._json(
            "POST",
            "/generate",
            payload,
            deadline_s=self.timeout_s if timeout_s is None else timeout_s,
            headers=headers,
            connect_retries=self.connect_retries,
        )
        if not isinstance(answer, dict):
            raise EngineProtocolError(
                self.base_url, "/generate", f"gave an answer that is not an object: {quote(answer)}"
            )
        return answer

    async def generate_result(
        self, payload: dict[str, Any], *, headers: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> GenerateResult:
        """Like `generate`, with the answer checked and parsed."""
        answer = await self.generate(payload, headers=headers, timeout_s=timeout_s)
        return GenerateResult.from_json(answer, url=self.base_url)

    async def abort(self, rid: str | None = None, *, abort_all: bool = False, timeout_s: float | None = None) -> None:
        """Abort one request by its id, or all of them; their ``/generate`` calls then answer with what they have."""
        if (rid is None) != abort_all:
            raise ValueError("abort needs either a rid or abort_all=True")
        body: dict[str, Any] = {"abort_all": True} if abort_all else {"rid": rid}
        await self._control("POST", "/abort_request", body, timeout_s)

    async def pause(self, mode: PauseMode = "abort", *, timeout_s: float | None = None) -> None:
        """Stop generating: running requests are aborted, frozen in place, or put back into the queue."""
        await self._control("POST", "/pause_generation", {"mode": mode}, timeout_s)

    async def continue_(self, *, timeout_s: float | None = None) -> None:
        """Undo `pause`."""
        await self._control("POST", "/continue_generation", {}, timeout_s)

    async def flush_cache(self, *, timeout_s: float | None = None) -> None:
        """Forget all cached prefixes."""
        await self._control("POST", "/flush_cache", {}, timeout_s)

    # -- health -------------------------------------------------------------------------------------------------

    async def health(self, *, timeout_s: float | None = None) -> bool:
        """True when the server answers 200; an engine that says 503 (still loading) is False, no engine raises."""
        return await self._healthy("/health", timeout_s)

    async def health_generate(self, *, timeout_s: float | None = None) -> bool:
        """True when the engine really generated a token just now."""
        return await self._healthy("/health_generate", timeout_s)

    async def server_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the engine says about itself."""
        return await self._control_json("GET", "/server_info", None, timeout_s)

    # -- weights and memory -------------------------------------------------------------------------------------

    async def update_weights_from_disk(
        self, path: str | Path, version: int | str, *, flush_cache: bool = True, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Load the weights of an HF folder."""
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush_cache}
        return await self._control_json("POST", "/update_weights_from_disk", body, timeout_s)

    async def update_weights_from_tensor_files(
        self,
        paths: Sequence[str | Path],
        version: int | str,
        *,
        flush_cache: bool = True,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Load HF-named tensors from safetensors files on the engine's machine (shared memory, usually)."""
        body = {
            "load_format": "safetensors_file",
            "paths": [str(path) for path in paths],
            "weight_version": str(version),
            "flush_cache": flush_cache,
        }
        return await self._control_json("POST", "/update_weights_from_tensor", body, timeout_s)

    async def get_weight_version(self, *, timeout_s: float | None = None) -> str:
        """The version of the weights the engine samples with now."""
        answer = await self._control_json("GET", "/get_weight_version", None, timeout_s)
        if "weight_version" not in answer:
            raise EngineProtocolError(
                self.base_url, "/get_weight_version", f"gave an answer without weight_version: {quote(answer)}"
            )
        return str(answer["weight_version"])

    async def release_memory(self, tags: Sequence[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Give device memory back ("weights", "kv_cache"); None means all."""
        await self._control("POST", "/release_memory_occupation", _tags(tags), timeout_s)

    async def resume_memory(self, tags: Sequence[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Undo `release_memory`."""
        await self._control("POST", "/resume_memory_occupation", _tags(tags), timeout_s)

    # -- life ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(
        self, method: str, call: str, *, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The raw, still unread response of a call (for proxies); connection errors come as `EngineUnreachable`.

        The one call without a deadline of its own: whoever forwards a response lives as long as its client.
        """
        try:
            async with self.session().request(method, self.base_url + call, data=data, headers=headers) as response:
                yield response
        except aiohttp.ClientError as error:
            raise self._unreachable(call, error) from error

    def session(self) -> aiohttp.ClientSession:
        """The HTTP session of the running event loop."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = aiohttp.ClientSession(
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
        self, method: Literal["GET", "POST"], call: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> str:
        deadline_s = self.control_timeout_s if timeout_s is None else timeout_s
        return await self._text(method, call, body, deadline_s=deadline_s)

    async def _control_json(
        self, method: Literal["GET", "POST"], call: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> dict[str, Any]:
        deadline_s = self.control_timeout_s if timeout_s is None else timeout_s
        answer = await self._json(method, call, body, deadline_s=deadline_s)
        if not isinstance(answer, dict):
            raise EngineProtocolError(self.base_url, call, f"gave an answer that is not an object: {quote(answer)}")
        if answer.get("success") is False:
            raise EngineRejected(self.base_url, call, 200, str(answer.get("message", quote(answer))))
        return answer

    async def _json(self, method: str, call: str, body: dict[str, Any] | None, **how: Any) -> Any:
        text = await self._text(method, call, body, **how)
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise EngineProtocolError(self.base_url, call, f"gave an answer that is not JSON: {quote(text)}") from error

    async def _text(
        self,
        method: str,
        call: str,
        body: dict[str, Any] | None,
        *,
        deadline_s: float,
        headers: dict[str, str] | None = None,
        connect_retries: int = 0,
    ) -> str:
        try:
            async with asyncio.timeout(deadline_s):
                for attempt in range(connect_retries + 1):
                    try:
                        return await self._once(method, call, body, headers)
                    except EngineUnreachable as error:
                        if error.accepted or attempt == connect_retries:
                            raise
                    await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
        except TimeoutError as error:
            raise EngineTimeout(self.base_url, call, deadline_s) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _once(self, method: str, call: str, body: dict[str, Any] | None, headers: dict[str, str] | None) -> str:
        try:
            async with self.session().request(method, self.base_url + call, json=body, headers=headers) as response:
                text = await response.text(errors="replace")
                status = response.status
        except aiohttp.ClientError as error:
            raise self._unreachable(call, error) from error
        if status >= 500:
            raise EngineFailed(self.base_url, call, status, error_message(text))
        if status != 200:
            raise EngineRejected(self.base_url, call, status, error_message(text))
        return text

    def _unreachable(self, call: str, error: aiohttp.ClientError) -> EngineUnreachable:
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return EngineUnreachable(self.base_url, call, f"could not connect ({error})", accepted=False)
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return EngineUnreachable(
            self.base_url, call, f"lost its connection before the answer was complete ({cause})", accepted=True
        )


@dataclass(eq=False)
class _Member:
    client: EngineClient
    in_flight: int = 0
    suspect_until: float = 0.0


class EnginePool:
    """Several engines behind one `generate`.

    Requests with the same ``affinity_key`` (a group, a session) go to the same engine, so that their common prefix is
    computed once; a new key goes to the engine with the fewest requests in flight. An engine that could not be
    reached is avoided for ``suspect_s`` and its request goes to another one. Used from one event loop.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 3600.0,
        control_timeout_s: float = 120.0,
        imbalance_limit: int = 64,
        suspect_s: float = 5.0,
        remembered_keys: int = 16384,
    ) -> None:
        if not urls:
            raise ValueError("an engine pool needs at least one engine")
        self._members = [
            _Member(EngineClient(url, timeout_s=timeout_s, control_timeout_s=control_timeout_s)) for url in urls
        ]
        self._imbalance_limit = imbalance_limit
        self._suspect_s = suspect_s
        self._remembered_keys = remembered_keys
        self._pinned: OrderedDict[Hashable, _Member] = OrderedDict()

    @property
    def urls(self) -> list[str]:
        """Base URLs, in the order given."""
        return [member.client.base_url for member in self._members]

    @property
    def clients(self) -> list[EngineClient]:
        """One client per engine, in the order given."""
        return [member.client for member in self._members]

    def __len__(self) -> int:
        return len(self._members)

    async def generate(
        self,
        payload: dict[str, Any],
        affinity_key: Hashable | None = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """`EngineClient.generate` on one engine; if that one cannot be reached, on each of the others in turn."""
        tried: list[_Member] = []
        while True:
            member = self._pick(affinity_key, tried)
            try:
                with _Load(member):
                    return await member.client.generate(payload, headers=headers, timeout_s=timeout_s)
            except EngineUnreachable:
                self._suspect(member)
                tried.append(member)
                if len(tried) == len(self._members):
                    raise

    async def generate_result(
        self, payload: dict[str, Any], affinity_key: Hashable | None = None, *, timeout_s: float | None = None
    ) -> GenerateResult:
        """Like `generate`, with the answer checked and parsed."""
        answer = await self.generate(payload, affinity_key, timeout_s=timeout_s)
        return GenerateResult.from_json(answer, url=" or ".join(self.urls) if len(self) > 1 else self.urls[0])

    async def broadcast(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call one `EngineClient` method on every engine at once; results in order, the first error is raised after
        all calls have ended."""
        calls = [getattr(member.client, method)(*args, **kwargs) for member in self._members]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    @asynccontextmanager
    async def open(
        self,
        method: str,
        call: str,
        affinity_key: Hashable | None = None,
        *,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """`EngineClient.open` on the engine that `generate` would choose."""
        member = self._pick(affinity_key, [])
        try:
            with _Load(member):
                async with member.client.open(method, call, data=data, headers=headers) as response:
                    yield response
        except EngineUnreachable:
            self._suspect(member)
            raise

    async def aclose(self) -> None:
        """Close the HTTP sessions of the running event loop."""
        for member in self._members:
            await member.client.aclose()

    def _pick(self, key: Hashable | None, tried: list[_Member]) -> _Member:
        now = asyncio.get_running_loop().time()
        candidates = [member for member in self._members if member not in tried and member.suspect_until <= now]
        candidates = candidates or [member for member in self._members if member not in tried]
        idlest = min(candidates, key=lambda member: member.in_flight)
        if key is None:
            return idlest
        pinned = self._pinned.get(key)
        if pinned not in candidates or pinned.in_flight - idlest.in_flight > self._imbalance_limit:
            pinned = idlest
        self._pinned[key] = pinned
        self._pinned.move_to_end(key)
        if len(self._pinned) > self._remembered_keys:
            self._pinned.popitem(last=False)
        return pinned

    def _suspect(self, member: _Member) -> None:
        member.suspect_until = asyncio.get_running_loop().time() + self._suspect_s


class _Load:
    """Counts a request as in flight on its engine while it lasts."""

    def __init__(self, member: _Member) -> None:
        self._member = member

    def __enter__(self) -> None:
        self._member.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self._member.in_flight -= 1


def _tags(tags: Sequence[str] | None) -> dict[str, Any]:
    return {} if tags is None else {"tags": list(tags)}
