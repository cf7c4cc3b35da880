"""The gate between training samples and the engines: open while a rollout collects, closed between two rollouts.

With `--partial-rollout` groups with a custom generate function hold a ticket: they stay alive while the gate is closed.
Invariant: nothing with a ticket is at an engine while the gate is closed and idle; evaluation passes at all times. The
gate knows who may pass, not what is asked: requests that it cut off are continued in `slime.rollout.generate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Literal

from slime.cluster.watchdog import waiting

evaluating: ContextVar[bool] = ContextVar("evaluating", default=False)
_ticket: ContextVar[Ticket | None] = ContextVar("ticket", default=None)
_clock: ContextVar[SampleClock | None] = ContextVar("clock", default=None)


class SampleTimeout(Exception):
    """A sample was not generated in time."""


@contextmanager
def as_evaluation() -> Iterator[None]:
    """What runs in the body, and the tasks it starts, samples for an evaluation: it is never held nor given up."""
    before = evaluating.set(True)
    try:
        yield
    finally:
        evaluating.reset(before)


class SampleClock:
    """How long a sample may take in all, over the parts of its way that are timed; the gate stops the clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._timeout: asyncio.Timeout | None = None
        self._stops = 0

    @asynccontextmanager
    async def running(self, who: str) -> AsyncIterator[None]:
        """Raises `SampleTimeout` when the body, and those before it, take longer; `who` is named then."""
        timeout = self._timeout = asyncio.timeout(self._left)
        try:
            async with timeout:
                before = _clock.set(self)
                try:
                    yield
                finally:
                    _clock.reset(before)
                    self._left, self._timeout = self._remaining(timeout), None
        except TimeoutError as error:
            if not timeout.expired():
                raise  # the body's own
            raise SampleTimeout(f"{who} did not end within {self._seconds:g} s (--rollout-sample-timeout)") from error

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """No time passes as long as one of these bodies lasts."""
        timeout = self._timeout
        if timeout is None or timeout.expired():
            yield
            return
        if not self._stops:
            self._left = self._remaining(timeout)
            timeout.reschedule(None)
        self._stops += 1
        try:
            yield
        finally:
            self._stops -= 1
            if not self._stops and self._timeout is timeout:
                timeout.reschedule(asyncio.get_running_loop().time() + self._left)

    def _remaining(self, timeout: asyncio.Timeout) -> float:
        when = timeout.when()
        return self._left if when is None else max(0.0, when - asyncio.get_running_loop().time())


class Seats(asyncio.Semaphore):
    """A limit on samples under way that may change; those that are under way when it sinks go on."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._limit = limit
        self._too_many = 0

    def resize(self, limit: int) -> None:
        """From now on so many."""
        change, self._limit = limit - self._limit, limit
        self._too_many -= change
        while self._too_many < 0:
            self._too_many += 1
            super().release()

    async def acquire(self) -> Literal[True]:
        while self._too_many > 0 and not self.locked():
            await super().acquire()
            self._too_many -= 1
        return await super().acquire()

    def release(self) -> None:
        if self._too_many > 0:
            self._too_many -= 1
        else:
            super().release()


class Gate:
    """Open or closed, and how many requests with a ticket are at the engines.

    Whoever waits here gives its seat (of the limit on samples under way) to others and takes one before it goes on.
    """

    def __init__(self, seats: asyncio.Semaphore) -> None:
        self._seats = seats
        self._owed = 0
        self._in_flight = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.when_closed: list[Callable[[], None]] = []
        """Told of each closing before whoever closes waits: for requests that another process makes."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        """Let everybody through."""
        self._opened.set()

    def close(self) -> None:
        """Let nobody through; those at the engines are still there (`wait_until_idle`)."""
        if self.is_open:
            self._opened.clear()
            for told in list(self.when_closed):
                told()

    async def wait_until_idle(self) -> None:
        """Until no request with a ticket is at an engine."""
        await self._idle.wait()

    async def pass_through(self) -> bool:
        """Wait until the gate is open; whether it was closed."""
        waited = False
        while not self.is_open:  # once more: it may have been closed again while there was no seat
            waited = True
            self._give_seat()
            try:
                with clock_stopped(), waiting("the next rollout", "before it may ask an engine", timeout_s=None):
                    await self._opened.wait()
                    await self._seats.acquire()
            except BaseException:
                self._owed += 1  # whoever is cancelled gives its seat back a second time on its way out
                raise
        return waited

    def arrived_at_engine(self) -> None:
        """Count a request."""
        self._in_flight += 1
        self._idle.clear()

    def left_engine(self) -> None:
        """Count it no more."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    def _give_seat(self) -> None:
        if self._owed:
            self._owed -= 1
        else:
            self._seats.release()


def clock_stopped() -> AbstractContextManager[None]:
    """The clock of the sample that the running code belongs to stands still meanwhile."""
    clock = _clock.get()
    return nullcontext() if clock is None else clock.stopped()


@dataclass(eq=False)
class Ticket:
    """What a group holds that may wait at the gate. `masks`: tokens of earlier rollouts are not trained on."""

    gate: Gate
    masks: bool = False
    in_flight: int = 0
    is_used: bool = False
    thrown_away_tokens: int = 0

    def context(self) -> Context:
        """A context for the group's task, in which `ticket_here` finds this ticket."""
        context = copy_context()
        context.run(_ticket.set, self)
        return context

    @asynccontextmanager
    async def engine_request(self) -> AsyncIterator[bool]:
        """One request, counted while the body lasts; begins when the gate is open, and says whether it was closed."""
        self.is_used = True
        waited = await self.gate.pass_through()
        self.in_flight += 1
        self.gate.arrived_at_engine()
        try:
            yield waited
        finally:
            self.in_flight -= 1
            self.gate.left_engine()


def ticket_here() -> Ticket | None:
    """The ticket of the group that the running code belongs to; evaluation needs none."""
    return None if evaluating.get() else _ticket.get()
