"""Registry of the waits of this process: waiter, target, reason and deadline of each.

Invariant: a wait is registered exactly while the body of its `waiting` runs. There is one registry per process, since
dependencies are visible only where all waits are known. It is a dict whose single operations are atomic, and it takes
no lock: a signal may arrive at any moment, also while a wait is being registered.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CoroutineType
from typing import Any, Self, TypeVar

AnyCoroutine = Coroutine[Any, Any, Any]
C = TypeVar("C", bound=AnyCoroutine)

_acting: ContextVar[tuple[str, ...]] = ContextVar("slime_acting", default=())


class Limit(float):
    """Seconds that come from a flag; a timeout error names the flag."""

    flag: str

    def __new__(cls, seconds: float, flag: str) -> Self:
        made = super().__new__(cls, seconds)
        made.flag = flag
        return made


class Wait:
    """One wait of `who` for `whom`; `path` has the names on whose behalf `who` waits, outermost first, then `who`."""

    __slots__ = ("began", "deadline", "flag", "path", "renewed", "task", "thread_id", "timeout_s", "who", "whom", "why")

    def __init__(self, who: str | None, whom: str, why: str, timeout_s: float | None, flag: str | None) -> None:
        try:
            self.task: asyncio.Future[Any] | None = asyncio.current_task()
        except RuntimeError:  # no event loop runs in this thread
            self.task = None
        self.thread_id = threading.get_ident()
        self.path = _acting.get() if who is None else (*_acting.get(), who)
        if not self.path:  # the task's name, unless asyncio generated it, else the thread's
            thread, name = threading.current_thread(), ""
            if isinstance(self.task, asyncio.Task) and not self.task.get_name().startswith("Task-"):
                name = self.task.get_name()
            self.path = (name or ("driver" if thread is threading.main_thread() else thread.name),)
        self.who = self.path[-1]
        self.whom = whom
        self.why = why
        self.timeout_s = timeout_s
        self.flag = timeout_s.flag if flag is None and isinstance(timeout_s, Limit) else flag
        self.began = time.monotonic()
        self.renewed: float | None = None
        self.deadline = None if timeout_s is None else self.began + timeout_s

    def renew(self) -> None:
        """Record progress of the target: the deadline counts from now."""
        self.renewed = time.monotonic()
        if self.timeout_s is not None:
            self.deadline = self.renewed + self.timeout_s

    def remaining(self) -> float | None:
        """Return the seconds until the deadline, at least 0; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def is_over(self) -> bool:
        """Return True if the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def sentence(self) -> str:
        """Format the wait as the first line of an error."""
        now = time.monotonic()
        idle = "" if self.renewed is None else f", the last {now - self.renewed:.3g} s without progress"
        return f"{self.who} waited {now - self.began:.3g} s for {self.whom} {self.why}{idle}{format_flag(self)}"


class WaitRegistry:
    """The waits of a process by number."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()

    def enter(self, wait: Wait) -> int:
        number = next(self._numbers)
        self._waits[number] = wait
        return number

    def leave(self, number: int) -> None:
        del self._waits[number]

    def waits(self) -> list[Wait]:
        """Return all current waits, the oldest first."""
        return list(self._waits.copy().values())


wait_registry = WaitRegistry()


@contextmanager
def waiting(
    whom: str, why: str, *, who: str | None = None, timeout_s: float | None, flag: str | None = None
) -> Iterator[Wait]:
    """Register a wait while the body runs, which blocks for at most `wait.remaining()`.

    A body that times out raises `expired(wait)`. `who` defaults to the name set by `acting_as`.
    """
    wait = Wait(who, whom, why, timeout_s, flag)
    number = wait_registry.enter(wait)
    try:
        yield wait
    finally:
        wait_registry.leave(number)


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Use `name` as the waiter of all waits in the body, also in tasks and `asyncio.to_thread` calls that it starts."""
    token = _acting.set((*_acting.get(), name))
    try:
        yield
    finally:
        _acting.reset(token)


def named(coro: C, name: str) -> C:
    """Name a coroutine after its purpose and return it; code that waits for it shows this name."""
    if isinstance(coro, CoroutineType):
        coro.__qualname__ = name
    return coro


def name_of(coro: AnyCoroutine) -> str:
    """Return the name of a coroutine: its function's name, or the one given by `named`."""
    return coro.__qualname__ if isinstance(coro, CoroutineType) else type(coro).__qualname__


def format_flag(wait: Wait) -> str:
    """Format the flag that sets a wait's deadline, as the end of a sentence."""
    return "" if wait.flag is None else f" ({wait.flag})"
