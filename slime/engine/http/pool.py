"""Load balancing over several engines, which may be added and removed at run time.

Invariant: a request goes to an engine that is up and not leaving, or waits until there is one. An engine that is down
or removed gets no requests, and those in flight on it end at once with the tokens sampled so far. A pool is used from
one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, overload

import aiohttp

from slime.cluster.watchdog import Limit, waiting
from slime.engine.http.client import REQUEST_FLAG, EngineClient, Growing, call_all
from slime.engine.http.errors import EngineError, EngineProtocolError, EngineUnreachable
from slime.engine.http.protocol import GenerateResult
from slime.storage.json_types import JsonMapping, JsonObject

T = TypeVar("T")

TRANSIENT_RETRIES = 3
FAULTY_RETRIES = 8
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 10.0
_DRAIN_POLL_S = 0.1
"""Interval between aborts while an engine drains: a request may still have been on its way to it."""
_SUSPECT_S = 5.0
"""How long an engine that could not be reached is avoided."""
_REMEMBERED_KEYS = 16384
_REMOVE_TIMEOUT_S = 5.0
"""How long `remove` waits for the requests in flight on the removed engine."""


@dataclass(eq=False)
class _Member:
    client: EngineClient
    in_flight: int = 0
    suspect_until: float = 0.0
    down: asyncio.Event = field(default_factory=asyncio.Event)
    is_leaving: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def takes_requests(self) -> bool:
        return not self.is_leaving and not self.down.is_set()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request as in flight while the body runs."""
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()


class Roster(Sequence[EngineClient]):
    """Live view of a pool's engines that are not leaving; holders need no notification of changes."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def _now(self) -> list[EngineClient]:
        return [member.client for member in self._pool._members if not member.is_leaving]

    @overload
    def __getitem__(self, index: int) -> EngineClient: ...

    @overload
    def __getitem__(self, index: slice) -> list[EngineClient]: ...

    def __getitem__(self, index: int | slice) -> EngineClient | list[EngineClient]:
        return self._now()[index]

    def __len__(self) -> int:
        return len(self._now())

    def __iter__(self) -> Iterator[EngineClient]:
        return iter(self._now())


class EnginePool:
    """Distributes requests over several engines.

    Requests with the same ``affinity_key`` (a group, a session) go to the same engine, so that their common prefix is
    computed once; a new key goes to the engine with the fewest requests in flight. An engine that could not be
    reached is avoided for a few seconds and its request goes to another one. A supervisor marks engines as down; while
    all of them are down, requests wait up to ``patience_s`` for one to come back. No call takes longer than
    ``timeout_s``, and control calls also no longer than ``control_timeout_s``. A pool may start without engines only
    if engines are added later (``may_be_empty``).
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 3600.0,
        control_timeout_s: float = 120.0,
        imbalance_limit: int = 64,
        patience_s: float = 600.0,
        api_key: str | None = None,
        may_be_empty: bool = False,
    ) -> None:
        if not urls and not may_be_empty:
            raise ValueError("an engine pool needs at least one engine")
        self._timeout_s = timeout_s
        self._control_timeout_s = Limit(timeout_s, REQUEST_FLAG) if timeout_s < control_timeout_s else control_timeout_s
        self._members = tuple(_Member(self._client(url, api_key)) for url in urls)  # replaced, never changed
        self._imbalance_limit = imbalance_limit
        self._patience_s = patience_s
        self._given_up: str | None = None
        self._any_up = asyncio.Event()
        self._note_up()
        self._pinned: OrderedDict[Hashable, _Member] = OrderedDict()
        self.when_changed: list[Callable[[str, str], None]] = []
        """Callbacks, called in the pool's event loop with a state and the engine's URL: "added", "up", "down",
        "leaving", "removed"; or with "given up" and the reason."""
        self.roster = Roster(self)

    def _client(self, url: str, api_key: str | None) -> EngineClient:
        return EngineClient(url, timeout_s=self._timeout_s, control_timeout_s=self._control_timeout_s, api_key=api_key)

    @property
    def urls(self) -> list[str]:
        """Base URLs, in the order in which the engines were added."""
        return [member.client.base_url for member in self._members]

    @property
    def clients(self) -> list[EngineClient]:
        """One client per engine, in the order in which they were added; includes leaving engines."""
        return [member.client for member in self._members]

    def __len__(self) -> int:
        return len(self._members)

    async def generate(self, payload: JsonObject, affinity_key: Hashable | None = None) -> JsonObject:
        """`EngineClient.generate` on one engine; if it cannot be reached, on each of the others in turn."""
        pool, headers = self._route(payload, affinity_key)
        asked = pool._first_reachable(lambda one: one.generate(payload, headers=headers), affinity_key)
        async with asked as (_, answer):
            return answer

    async def sample(
        self,
        payload: JsonObject,
        affinity_key: Hashable | None = None,
        *,
        fault_tolerant: bool = False,
        on_ids: Callable[[list[int]], Awaitable[None]] | None = None,
    ) -> GenerateResult:
        """Return what an engine samples for a request: a complete answer, or one that was aborted, with its tokens.

        If the engine cannot be reached, the request goes to each of the others in turn. After another transient error,
        or if none can be reached, it is sent again with backoff. In a fault-tolerant run, or with `on_ids`, which is
        called with the new token ids as they arrive, the answer is streamed (`generate_resumable`).
        """
        attempts = FAULTY_RETRIES if fault_tolerant else TRANSIENT_RETRIES + 1
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (attempt - (not fault_tolerant)), MAX_BACKOFF_S))
            try:
                if fault_tolerant or on_ids is not None:
                    return await self.generate_resumable(payload, affinity_key, on_ids=on_ids)
                pool, headers = self._route(payload, affinity_key)
                tried: list[_Member] = []
                while True:
                    await pool._wait_for_engine()
                    member = pool._pick(affinity_key, tried)
                    with member.counting():
                        try:
                            return await _unless_down(member, member.client.generate_result(payload, headers=headers))
                        except EngineUnreachable:
                            if not pool._has_another(member, tried):
                                raise
            except EngineError as error:
                if not error.transient or attempt == attempts - 1:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _route(
        self, payload: JsonMapping, affinity_key: Hashable | None, *, is_resumable: bool = False
    ) -> tuple[EnginePool, dict[str, str] | None]:
        """Return the pool that serves a request, and headers for it; a pool behind a router may send it there."""
        return self, None

    @contextlib.asynccontextmanager
    async def _first_reachable(
        self, ask: Callable[[EngineClient], Awaitable[T]], affinity_key: Hashable | None
    ) -> AsyncIterator[tuple[_Member, T]]:
        """Yield the first reachable engine and its response; the request counts as in flight while the body runs."""
        tried: list[_Member] = []
        while True:
            await self._wait_for_engine()
            member = self._pick(affinity_key, tried)
            with member.counting():
                try:
                    answer = await _unless_down(member, ask(member.client))
                except EngineUnreachable:
                    if not self._has_another(member, tried):
                        raise
                    continue
                yield member, answer
                return

    def _has_another(self, member: _Member, tried: list[_Member]) -> bool:
        """Note that an engine could not be reached, and return whether there is one that was not tried yet."""
        self._suspect(member)
        tried.append(member)
        return not self._members or any(one not in tried for one in self._members)

    async def generate_resumable(
        self,
        payload: JsonObject,
        affinity_key: Hashable | None = None,
        *,
        on_ids: Callable[[list[int]], Awaitable[None]] | None = None,
    ) -> GenerateResult:
        """Request a streamed response, so that the tokens of an engine that dies, or is marked down while it hangs, are
        kept: such a response counts as aborted and can be continued elsewhere. Without tokens the error is raised.

        `on_ids` is called with the ids of each event.
        """
        pool, headers = self._route(payload, affinity_key, is_resumable=True)
        await pool._wait_for_engine()
        member, kept = pool._pick(affinity_key, []), Growing()
        cause: EngineError | None = None
        try:
            with member.counting():
                await _unless_down(member, member.client.stream_generate(kept, payload, headers=headers, on_ids=on_ids))
        except EngineUnreachable as error:
            pool._suspect(member)
            cause = error
        if kept.empty:
            reason = "ended its stream without a response"
            raise cause or EngineUnreachable(member.client.base_url, "/generate", reason, accepted=True)
        result = await member.client.streamed_result(kept, cause)
        if cause is not None and not len(result.id_array):
            raise cause
        return result

    # membership

    def add(self, url: str, *, api_key: str | None = None, up: bool = False) -> EngineClient:
        """Add an engine, which gets no requests before `set_up` (or at once with `up`)."""
        if self._member(url) is not None:
            raise ValueError(f"engine {url} is in the pool already")
        member = _Member(self._client(url, api_key))
        member.down.set()
        self._members = (*self._members, member)
        self._tell("added", url)
        if up:
            self.set_up(url)
        return member.client

    async def remove(self, url: str) -> None:
        """Remove an engine; its requests in flight end now. Does nothing for an unknown URL."""
        member = self._member(url)
        if member is None:
            return
        self._members = tuple(one for one in self._members if one is not member)
        self._pinned = OrderedDict((key, pinned) for key, pinned in self._pinned.items() if pinned is not member)
        member.down.set()
        self._note_up()
        self._tell("removed", url)
        await _wait_until_idle(member, _REMOVE_TIMEOUT_S)
        await member.client.aclose()

    def leave(self, url: str) -> None:
        """Send an engine no more requests and no more weights; its requests in flight may finish."""
        if (member := self._member(url)) is not None:
            member.is_leaving = True
            self._note_up()
            self._tell("leaving", url)

    async def drain(self, url: str, *, within_s: float) -> bool:
        """Send an engine no more requests and abort those in flight, which keep their tokens and are continued on
        other engines. Returns true if no request is left; the caller then removes the engine."""
        self.leave(url)
        member = self._member(url)
        if member is None:
            return True
        with waiting(f"engine {url}", "to hand over its requests", timeout_s=within_s) as wait:
            while member.in_flight and not member.down.is_set() and not wait.is_over():
                try:
                    await member.client.abort(abort_all=True, timeout_s=max(0.1, wait.remaining() or 0.0))
                except EngineError:  # unreachable: its requests fail by themselves, or end when it is removed
                    break
                await _wait_until_idle(member, _DRAIN_POLL_S)
        return not member.in_flight

    def set_down(self, url: str) -> None:
        """Mark an engine as down: it gets no more requests, and those in flight end now."""
        if (member := self._member(url)) is not None:
            member.down.set()
            self._tell("down", url)
            self._note_up()

    def set_up(self, url: str) -> None:
        """Mark an engine as up. Does nothing if it was removed."""
        if (member := self._member(url)) is not None:
            member.down.clear()
            member.suspect_until = 0.0
            self._note_up()
            self._tell("up", url)

    def _note_up(self) -> None:
        if self._given_up is not None or any(member.takes_requests for member in self._members):
            self._any_up.set()
        else:
            self._any_up.clear()

    def give_up(self, reason: str) -> None:
        """Declare that no engine will be restarted: engines that are up keep working; without one, requests fail with
        `reason`."""
        self._given_up = reason
        self._any_up.set()
        self._tell("given up", reason)

    def _tell(self, state: str, what: str) -> None:
        for callback in list(self.when_changed):
            callback(state, what)

    @property
    def up(self) -> list[EngineClient]:
        """Clients of the engines that are not down."""
        return [member.client for member in self._members if not member.down.is_set()]

    def state_of(self, url: str) -> str:
        """State of an engine: "up", "down", "leaving" or "gone"."""
        member = self._member(url)
        if member is None:
            return "gone"
        return "leaving" if member.is_leaving else "down" if member.down.is_set() else "up"

    def key_of(self, url: str) -> str | None:
        """API key of an engine."""
        member = self._member(url)
        return None if member is None else member.client.api_key

    def _member(self, url: str) -> _Member | None:
        return next((member for member in self._members if member.client.base_url == url), None)

    def _no_engine_error(self, reason: str) -> EngineUnreachable:
        url = self._members[0].client.base_url if self._members else "(none)"
        return EngineUnreachable(url, "/generate", reason, accepted=False)

    async def _wait_for_engine(self) -> None:
        if not self._any_up.is_set():
            with waiting("an engine", "to come back", timeout_s=self._patience_s) as wait:
                try:
                    async with asyncio.timeout(wait.remaining()):
                        await self._any_up.wait()
                except TimeoutError:
                    reason = f"is down, and no other engine came up within {self._patience_s:g} s"
                    raise self._no_engine_error(reason) from None
        if self._given_up is not None and not self.up:
            raise EngineProtocolError(self._no_engine_error("").url, "/generate", f"was given up: {self._given_up}")

    async def broadcast(self, method: str, *args: object, **kwargs: object) -> Sequence[object]:
        """Call an `EngineClient` method on every engine that is up; returns the results in order. The first error is
        raised after all calls have ended."""
        return await call_all(self.up, lambda client: getattr(client, method)(*args, **kwargs))

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        call: str,
        affinity_key: Hashable | None = None,
        *,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """`EngineClient.open` on the engine that `sample` would choose, or on another one if it is unreachable.

        Reading the response of an engine that goes down raises `EngineUnreachable`.
        """
        member: _Member | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:

                def begin(client: EngineClient) -> Awaitable[aiohttp.ClientResponse]:
                    return stack.enter_async_context(client.open(method, call, data=data, headers=headers))

                async def close_when_down(member: _Member, response: aiohttp.ClientResponse) -> None:
                    await member.down.wait()
                    response.close()

                async with self._first_reachable(begin, affinity_key) as (member, response):
                    closing = asyncio.ensure_future(close_when_down(member, response))
                    try:
                        yield response
                    finally:
                        closing.cancel()
        except EngineUnreachable:
            if member is not None:
                self._suspect(member)
            raise

    async def aclose(self) -> None:
        """Close the HTTP sessions of the running event loop."""
        for member in self._members:
            await member.client.aclose()

    def _pick(self, key: Hashable | None, tried: list[_Member]) -> _Member:
        now = asyncio.get_running_loop().time()
        left = [member for member in self._members if member not in tried]
        if not left:
            raise self._no_engine_error("cannot be sent: the pool has no engine")
        up = [member for member in left if member.takes_requests] or left
        candidates = [member for member in up if member.suspect_until <= now] or up
        idlest = min(candidates, key=lambda member: member.in_flight)
        if key is None:
            return idlest
        pinned = self._pinned.get(key)
        if pinned not in candidates or pinned.in_flight - idlest.in_flight > self._imbalance_limit:
            pinned = idlest
        self._pinned[key] = pinned
        self._pinned.move_to_end(key)
        if len(self._pinned) > _REMEMBERED_KEYS:
            self._pinned.popitem(last=False)
        return pinned

    def _suspect(self, member: _Member) -> None:
        member.suspect_until = asyncio.get_running_loop().time() + _SUSPECT_S
        if self._given_up is not None:
            member.down.set()


async def _unless_down(member: _Member, asking: Awaitable[T]) -> T:
    """The response of an engine; raises `EngineUnreachable` as soon as the engine is marked down."""
    reading: asyncio.Future[T] = asyncio.ensure_future(asking)
    going_down = asyncio.ensure_future(member.down.wait())
    try:
        await asyncio.wait((reading, going_down), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return await reading
        reason = "went down before the answer was complete"
        raise EngineUnreachable(member.client.base_url, "/generate", reason, accepted=True)
    finally:
        for task in (reading, going_down):
            task.cancel()
        await asyncio.gather(reading, going_down, return_exceptions=True)


async def _wait_until_idle(member: _Member, seconds: float) -> None:
    """Wait until an engine has none of the pool's requests in flight, for at most `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while member.in_flight:
                await member.idle.wait()
