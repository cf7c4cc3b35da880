"""Several engines behind one `generate`; they may come and go.

Invariant: a request goes to an engine that is up and stays, or waits until there is one; an engine that is down or gone
gets none, and those it had end at once with what they had sampled. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import aiohttp

from slime.cluster.watchdog import Limit, waiting
from slime.engine.http.client import REQUEST_FLAG, EngineClient, Growing
from slime.engine.http.errors import EngineError, EngineProtocolError, EngineUnreachable
from slime.engine.http.protocol import GenerateResult

T = TypeVar("T")

_ABORT_AGAIN_S = 0.1
"""Between two looks at an engine that is leaving: a request may have been on its way to it."""
_LET_GO_S = 5.0
"""How long requests of an engine that is gone may take to see it."""


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


class Roster(Sequence[EngineClient]):
    """The engines that stay, as of the moment when it is looked at: whoever keeps this need not be told of changes."""

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
    """Several engines behind one `generate`.

    Requests with the same ``affinity_key`` (a group, a session) go to the same engine, so that their common prefix is
    computed once; a new key goes to the engine with the fewest requests in flight. An engine that could not be
    reached is avoided for ``suspect_s`` and its request goes to another one. Whoever watches over the engines says
    which are down; with all of them down, requests wait ``patience_s`` for one to come back. No call takes longer than
    ``timeout_s``, and those that do not generate no longer than ``control_timeout_s`` either. A pool may begin without
    engines only if they are going to come (``may_be_empty``).
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
        self._suspect_s = suspect_s
        self._remembered_keys = remembered_keys
        self._patience_s = patience_s
        self._given_up: str | None = None
        self._any_up = asyncio.Event()
        self._note_up()
        self._pinned: OrderedDict[Hashable, _Member] = OrderedDict()
        self.when_changed: list[Callable[[str, str], None]] = []
        """Told, in the pool's event loop, of each engine's URL that is "added", "up", "down", "leaving" or "removed",
        and why all were "given up"."""
        self.roster = Roster(self)

    def _client(self, url: str, api_key: str | None) -> EngineClient:
        return EngineClient(url, timeout_s=self._timeout_s, control_timeout_s=self._control_timeout_s, api_key=api_key)

    @property
    def urls(self) -> list[str]:
        """Base URLs, in the order in which they came."""
        return [member.client.base_url for member in self._members]

    @property
    def clients(self) -> list[EngineClient]:
        """One client per engine, in the order in which they came; those that leave too."""
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
        return await self._asked(
            lambda client: client.generate(payload, headers=headers, timeout_s=timeout_s), affinity_key
        )

    async def generate_result(
        self,
        payload: dict[str, Any],
        affinity_key: Hashable | None = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> GenerateResult:
        """Like `generate`, with the answer checked and parsed."""
        return await self._asked(
            lambda client: client.generate_result(payload, headers=headers, timeout_s=timeout_s), affinity_key
        )

    async def _asked(self, ask: Callable[[EngineClient], Awaitable[T]], affinity_key: Hashable | None) -> T:
        async with self._reached(ask, affinity_key) as (_, answer):
            return answer

    @contextlib.asynccontextmanager
    async def _reached(
        self, ask: Callable[[EngineClient], Awaitable[T]], affinity_key: Hashable | None
    ) -> AsyncIterator[tuple[_Member, T]]:
        """The first engine that can be reached, and its answer; it has this request while the body runs."""
        tried: list[_Member] = []
        while True:
            await self._wait_for_one()
            member = self._pick(affinity_key, tried)
            with _Load(member):
                try:
                    answer = await _while_up(member, ask(member.client))
                except EngineUnreachable:
                    self._suspect(member)
                    tried.append(member)
                    if self._members and all(one in tried for one in self._members):
                        raise
                    continue
                yield member, answer
                return

    async def generate_kept(
        self,
        payload: dict[str, Any],
        affinity_key: Hashable | None = None,
        *,
        headers: dict[str, str] | None = None,
        on_ids: Callable[[list[int]], Awaitable[None]] | None = None,
    ) -> tuple[GenerateResult | None, EngineError | None]:
        """(what was sampled, what broke it off): nothing breaks a complete answer.

        The answer is streamed, so an engine that dies, or is declared down while it hangs, leaves the tokens it had.
        `on_ids` is told the ids as they come.
        """
        await self._wait_for_one()
        member, kept = self._pick(affinity_key, []), Growing()
        url = member.client.base_url
        cause: EngineError | None = None
        try:
            with _Load(member):
                await _while_up(member, member.client.generate_into(kept, payload, headers=headers, on_ids=on_ids))
        except EngineUnreachable as error:
            self._suspect(member)
            cause = error
        if kept.empty:
            return None, cause or EngineUnreachable(
                url, "/generate", "ended its stream without an answer", accepted=True
            )
        return await member.client.grown_result(kept, cause), cause

    # who is there

    def add(self, url: str, *, api_key: str | None = None, up: bool = False) -> EngineClient:
        """One more engine, which gets no requests before it is `set_up` (or `up` at once)."""
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
        """Forget an engine; requests that it has end now. One that is not here is no mistake."""
        member = self._member(url)
        if member is None:
            return
        self._members = tuple(one for one in self._members if one is not member)
        self._pinned = OrderedDict((key, pinned) for key, pinned in self._pinned.items() if pinned is not member)
        member.down.set()
        self._note_up()
        self._tell("removed", url)
        await _idle_within(member, _LET_GO_S)
        await member.client.aclose()

    def leave(self, url: str) -> None:
        """No more requests for this engine, and no more weights; what it samples may end."""
        if (member := self._member(url)) is not None:
            member.is_leaving = True
            self._note_up()
            self._tell("leaving", url)

    async def drain(self, url: str, *, within_s: float) -> bool:
        """No more requests for an engine that is leaving; what it samples ends with all that it has, to be continued
        elsewhere. Whether it had nothing left to do at the end; it is still to be removed."""
        self.leave(url)
        member = self._member(url)
        if member is None:
            return True
        with waiting(f"engine {url}", "to hand over its requests", timeout_s=within_s) as wait:
            while member.in_flight and not member.down.is_set() and not wait.is_over():
                try:
                    await member.client.abort(abort_all=True, timeout_s=max(0.1, wait.remaining() or 0.0))
                except EngineError:  # it is gone: its requests end by themselves, or when it is removed
                    break
                await _idle_within(member, _ABORT_AGAIN_S)
        return not member.in_flight

    def set_down(self, url: str) -> None:
        """No more requests for this engine; those it has end now."""
        if (member := self._member(url)) is not None:
            member.down.set()
            self._tell("down", url)
            self._note_up()

    def set_up(self, url: str) -> None:
        """The engine is back. One that was removed meanwhile stays away."""
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
        """Nobody brings engines back any more: those that answer go on, and whoever finds no other one is told."""
        self._given_up = reason
        self._any_up.set()
        self._tell("given up", reason)

    def _tell(self, state: str, what: str) -> None:
        for told in list(self.when_changed):
            told(state, what)

    @property
    def up(self) -> list[EngineClient]:
        """Clients of the engines that are not down."""
        return [member.client for member in self._members if not member.down.is_set()]

    def state_of(self, url: str) -> str:
        """In a word: "up", "down", "leaving" or "gone"."""
        member = self._member(url)
        if member is None:
            return "gone"
        return "leaving" if member.is_leaving else "down" if member.down.is_set() else "up"

    def key_of(self, url: str) -> str | None:
        """What an engine asks of whoever calls it."""
        member = self._member(url)
        return None if member is None else member.client.api_key

    def _member(self, url: str) -> _Member | None:
        return next((member for member in self._members if member.client.base_url == url), None)

    def _nobody(self, reason: str) -> EngineUnreachable:
        url = self._members[0].client.base_url if self._members else "(none)"
        return EngineUnreachable(url, "/generate", reason, accepted=False)

    async def _wait_for_one(self) -> None:
        if not self._any_up.is_set():
            with waiting("an engine", "to come back", timeout_s=self._patience_s) as wait:
                try:
                    async with asyncio.timeout(wait.remaining()):
                        await self._any_up.wait()
                except TimeoutError:
                    reason = f"is down, and no other engine came up within {self._patience_s:g} s"
                    raise self._nobody(reason) from None
        if self._given_up is not None and not self.up:
            raise EngineProtocolError(self._nobody("").url, "/generate", f"was given up: {self._given_up}")

    async def broadcast(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call one `EngineClient` method on every engine that is up; results in order, the first error is raised
        after all calls have ended."""
        calls = [getattr(client, method)(*args, **kwargs) for client in self.up]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

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
        """`EngineClient.open` on the engine that `generate` would choose, or on another while none has answered.

        Reading the response of an engine that goes down ends in an `EngineUnreachable`.
        """
        member: _Member | None = None
        try:
            async with contextlib.AsyncExitStack() as stack:

                def begin(client: EngineClient) -> Awaitable[aiohttp.ClientResponse]:
                    return stack.enter_async_context(client.open(method, call, data=data, headers=headers))

                async with self._reached(begin, affinity_key) as (member, response):
                    closing = asyncio.ensure_future(_close_when_down(member, response))
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
            raise self._nobody("cannot be asked: there is no engine")
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
        if len(self._pinned) > self._remembered_keys:
            self._pinned.popitem(last=False)
        return pinned

    def _suspect(self, member: _Member) -> None:
        member.suspect_until = asyncio.get_running_loop().time() + self._suspect_s
        if self._given_up is not None:
            member.down.set()


async def _while_up(member: _Member, asking: Awaitable[T]) -> T:
    """What an engine answers, or `EngineUnreachable` as soon as it is declared down."""
    reading: asyncio.Future[T] = asyncio.ensure_future(asking)
    falling = asyncio.ensure_future(member.down.wait())
    try:
        await asyncio.wait((reading, falling), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return await reading
        reason = "went down before the answer was complete"
        raise EngineUnreachable(member.client.base_url, "/generate", reason, accepted=True)
    finally:
        for task in (reading, falling):
            task.cancel()
        await asyncio.gather(reading, falling, return_exceptions=True)


async def _close_when_down(member: _Member, response: aiohttp.ClientResponse) -> None:
    await member.down.wait()
    response.close()


async def _idle_within(member: _Member, seconds: float) -> None:
    """Wait until an engine has none of our requests, or for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while member.in_flight:
                await member.idle.wait()


class _Load:
    """Counts a request as in flight on its engine while it lasts."""

    def __init__(self, member: _Member) -> None:
        self._member = member

    def __enter__(self) -> None:
        self._member.in_flight += 1
        self._member.idle.clear()

    def __exit__(self, *_: object) -> None:
        self._member.in_flight -= 1
        if not self._member.in_flight:
            self._member.idle.set()
