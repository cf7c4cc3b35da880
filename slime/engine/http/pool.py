"""Several engines behind one `generate`.

Invariant: a request goes to an engine that is up, or waits until one is; an engine that is down gets none, and those it
had end at once with what they had sampled. Used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from slime.engine.http.client import REQUEST_FLAG, EngineClient, Growing
from slime.engine.http.errors import EngineError, EngineProtocolError, EngineUnreachable
from slime.engine.http.protocol import GenerateResult
from slime.waits import Limit, waiting

T = TypeVar("T")


@dataclass(eq=False)
class _Member:
    client: EngineClient
    in_flight: int = 0
    suspect_until: float = 0.0
    down: asyncio.Event = field(default_factory=asyncio.Event)


class EnginePool:
    """Several engines behind one `generate`.

    Requests with the same ``affinity_key`` (a group, a session) go to the same engine, so that their common prefix is
    computed once; a new key goes to the engine with the fewest requests in flight. An engine that could not be
    reached is avoided for ``suspect_s`` and its request goes to another one. Whoever watches over the engines says
    which are down; with all of them down, requests wait ``patience_s`` for one to come back. No call takes longer than
    ``timeout_s``, and those that do not generate no longer than ``control_timeout_s`` either.
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
    ) -> None:
        if not urls:
            raise ValueError("an engine pool needs at least one engine")
        if timeout_s < control_timeout_s:
            control_timeout_s = Limit(timeout_s, REQUEST_FLAG)
        self._members = [
            _Member(EngineClient(url, timeout_s=timeout_s, control_timeout_s=control_timeout_s, api_key=api_key))
            for url in urls
        ]
        self._imbalance_limit = imbalance_limit
        self._suspect_s = suspect_s
        self._remembered_keys = remembered_keys
        self._patience_s = patience_s
        self._any_up = asyncio.Event()
        self._any_up.set()
        self._given_up: str | None = None
        self._pinned: OrderedDict[Hashable, _Member] = OrderedDict()
        self.when_changed: list[Callable[[str, str], None]] = []
        """Told, in the pool's event loop, of each engine's URL that is "up" or "down", and why all were "given up"."""

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
        tried: list[_Member] = []
        await self._wait_for_one()
        while True:
            member = self._pick(affinity_key, tried)
            try:
                with _Load(member):
                    return await ask(member.client)
            except EngineUnreachable:
                self._suspect(member)
                tried.append(member)
                if len(tried) == len(self._members):
                    raise

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
        reading = asyncio.ensure_future(member.client.generate_into(kept, payload, headers=headers, on_ids=on_ids))
        falling = asyncio.ensure_future(member.down.wait())
        cause: EngineError | None = None
        try:
            with _Load(member):
                await asyncio.wait((reading, falling), return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    await reading
                else:
                    cause = EngineUnreachable(
                        url, "/generate", "went down before the answer was complete", accepted=True
                    )
        except EngineUnreachable as error:
            self._suspect(member)
            cause = error
        finally:
            for task in (reading, falling):
                task.cancel()
            await asyncio.gather(reading, falling, return_exceptions=True)
        if kept.empty:
            return None, cause or EngineUnreachable(
                url, "/generate", "ended its stream without an answer", accepted=True
            )
        return await member.client.grown_result(kept, cause), cause

    # who is there

    def set_down(self, url: str) -> None:
        """No more requests for this engine; those it has end now."""
        self._member(url).down.set()
        self._tell("down", url)
        if self._given_up is None and all(member.down.is_set() for member in self._members):
            self._any_up.clear()

    def set_up(self, url: str) -> None:
        """The engine is back."""
        member = self._member(url)
        member.down.clear()
        member.suspect_until = 0.0
        self._any_up.set()
        self._tell("up", url)

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

    def _member(self, url: str) -> _Member:
        return next(member for member in self._members if member.client.base_url == url)

    async def _wait_for_one(self) -> None:
        if not self._any_up.is_set():
            with waiting("an engine", "to come back", timeout_s=self._patience_s) as wait:
                try:
                    async with asyncio.timeout(wait.remaining()):
                        await self._any_up.wait()
                except TimeoutError:
                    reason = f"is down, and no other engine came up within {self._patience_s:g} s"
                    raise EngineUnreachable(self.urls[0], "/generate", reason, accepted=False) from None
        if self._given_up is not None and not self.up:
            raise EngineProtocolError(self.urls[0], "/generate", f"was given up: {self._given_up}")

    async def broadcast(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call one `EngineClient` method on every engine that is up; results in order, the first error is raised
        after all calls have ended."""
        calls = [getattr(client, method)(*args, **kwargs) for client in self.up]
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
        left = [member for member in self._members if member not in tried]
        up = [member for member in left if not member.down.is_set()] or left
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


class _Load:
    """Counts a request as in flight on its engine while it lasts."""

    def __init__(self, member: _Member) -> None:
        self._member = member

    def __enter__(self) -> None:
        self._member.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self._member.in_flight -= 1
