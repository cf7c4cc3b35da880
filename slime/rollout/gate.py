"""Dispatch gate between training samples and the engines: open during a rollout, closed between two rollouts.

With `--partial-rollout`, groups with a custom generate function have a ticket and stay alive while the gate is closed.
The gate decides only whether a request may be sent. The generate function, the requests of plugins and the turns of
agents each ask for the rest of an answer that was cut off in a loop: a request waits at the gate of its ticket, its
tokens are kept, and `count_abort` limits the aborts.

Invariant: no request with a ticket is at an engine while the gate is closed and idle. Evaluation always passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Literal

from slime.cluster.watchdog import waiting
from slime.engine.http.protocol import sampling_seed
from slime.storage.json_types import JsonMapping, JsonObject

MAX_RESUMES = 16
"""How often in a row engines may abort a request that the run still needs, without a new token.

With elastic engines a long answer is cut off often, but makes progress in between.
"""

evaluating: ContextVar[bool] = ContextVar("evaluating", default=False)
_ticket: ContextVar[Ticket | None] = ContextVar("ticket", default=None)
_clock: ContextVar[SampleClock | None] = ContextVar("clock", default=None)


class SampleTimeout(Exception):
    """A sample was not generated in time."""


@contextmanager
def as_evaluation() -> Iterator[None]:
    """Mark the body, and the tasks it starts, as sampling for an evaluation, which is never held or aborted."""
    before = evaluating.set(True)
    try:
        yield
    finally:
        evaluating.reset(before)


class SampleClock:
    """Limits the total time of a sample over the stages that are timed; the clock stops while the sample waits."""

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._timeout: asyncio.Timeout | None = None
        self._stops = 0

    @asynccontextmanager
    async def running(self, who: str) -> AsyncIterator[None]:
        """Raise `SampleTimeout`, which names `who`, if this body and the earlier ones take too long in total."""
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
                raise  # raised by the body itself
            raise SampleTimeout(f"{who} did not end within {self._seconds:g} s (--rollout-sample-timeout)") from error

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock while at least one such body runs."""
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


class ConcurrencyLimit(asyncio.Semaphore):
    """Adjustable limit on samples in flight; samples in flight continue when the limit decreases."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._limit = limit
        self._too_many = 0

    def resize(self, limit: int) -> None:
        """Set a new limit."""
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
    """Holds requests while closed, and counts the requests with a ticket that are at the engines.

    A waiting sample releases its slot of the concurrency limit, and acquires one again before it continues.
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
        """Callbacks run when the gate closes, before the caller waits; used for requests of other processes."""

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        """Let requests pass."""
        self._opened.set()

    def close(self) -> None:
        """Hold new requests; those already at the engines continue (`wait_until_idle`)."""
        if self.is_open:
            self._opened.clear()
            for callback in list(self.when_closed):
                callback()

    async def wait_until_idle(self) -> None:
        """Wait until no request with a ticket is at an engine."""
        await self._idle.wait()

    async def pass_through(self) -> bool:
        """Wait until the gate is open, and return whether it was closed."""
        waited = False
        while not self.is_open:  # it may close again while no slot is free
            waited = True
            if self._owed:
                self._owed -= 1
            else:
                self._seats.release()
            try:
                with paused_sample_clock(), waiting("the next rollout", "before it may send a request", timeout_s=None):
                    await self._opened.wait()
                    await self._seats.acquire()
            except BaseException:
                self._owed += 1  # a cancelled sample releases its slot a second time when it exits
                raise
        return waited

    def arrived_at_engine(self) -> None:
        """Count a request that is sent to an engine."""
        self._in_flight += 1
        self._idle.clear()

    def left_engine(self) -> None:
        """Stop counting a request."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()


def paused_sample_clock() -> AbstractContextManager[None]:
    """Stop the clock of the current sample while the body runs."""
    clock = _clock.get()
    return nullcontext() if clock is None else clock.stopped()


@dataclass(eq=False)
class Ticket:
    """Lets a group wait at the gate. With `masks`, tokens of earlier rollouts are not trained on."""

    gate: Gate
    masks: bool = False
    in_flight: int = 0
    is_used: bool = False
    thrown_away_tokens: int = 0

    def context(self) -> Context:
        """Return a context for the group's task, in which `current_ticket` returns this ticket."""
        context = copy_context()
        context.run(_ticket.set, self)
        return context

    @asynccontextmanager
    async def engine_request(self) -> AsyncIterator[bool]:
        """Wait for the gate, and count one request while the body runs.

        Yields True if the tokens so far are not trained on: the gate was closed, and the ticket has `masks`.
        """
        self.is_used = True
        waited = await self.gate.pass_through()
        self.in_flight += 1
        self.gate.arrived_at_engine()
        try:
            yield waited and self.masks
        finally:
            self.in_flight -= 1
            self.gate.left_engine()


def current_ticket() -> Ticket | None:
    """Return the ticket of the current group; None in an evaluation."""
    return None if evaluating.get() else _ticket.get()


class AbortedTooOften(Exception):
    """Engines repeatedly aborted a request that the run still needs."""


class RequestSeeds:
    """Gives each request of a sample its own seed, derived from the seed in the sample's sampling parameters."""

    def __init__(self, seed: int | None, begun: int = 0) -> None:
        self._seed = seed
        self._requests = begun

    def apart(self, params: JsonMapping) -> JsonObject:
        """Return the parameters of the next request; if they have the sample's seed, it is replaced by a new one."""
        if self._seed is None or params.get("sampling_seed") != self._seed:
            return dict(params)
        self._requests += 1
        own = self._seed if self._requests == 1 else sampling_seed(self._seed, "request", self._requests)
        return {**params, "sampling_seed": own}


def count_abort(aborts: int, sampled: int, ticket: Ticket | None) -> int:
    """Return the number of aborts in a row without a new token, after one more that brought `sampled` tokens.

    Raises `AbortedTooOften` instead of counting the `MAX_RESUMES`th. An abort counts only if the ticket's gate is open:
    a gate that closes cuts requests off itself.
    """
    if ticket is not None and not ticket.gate.is_open:
        return aborts
    aborts = 0 if sampled else aborts + 1
    if aborts == MAX_RESUMES:
        raise AbortedTooOften(f"the engine aborted this request {MAX_RESUMES} times in a row without a new token")
    return aborts
