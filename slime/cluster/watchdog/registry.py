"""The board: every wait of this process while it lasts, with who waits for whom, why and until when.

The invariant: a wait is on the board exactly as long as the body of its `waiting` runs. There is one board per process,
as there is one log, because only the place that sees everything can say what hangs on what. It is kept in a dict whose
single operations are atomic, and takes no lock: a signal may come at any moment, also while a wait is being entered.
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

C = TypeVar("C", bound=Coroutine[Any, Any, Any])

_acting: ContextVar[tuple[str, ...]] = ContextVar("slime_acting", default=())


class Limit(float):
    """Seconds that come from a flag; whoever runs out of them names it."""

    flag: str

    def __new__(cls, seconds: float, flag: str) -> Self:
        made = super().__new__(cls, seconds)
        made.flag = flag
        return made


class Wait:
    """One wait: `path` are the names of those on whose behalf `who` waits, outermost first, itself included."""

    __slots__ = ("began", "deadline", "flag", "path", "renewed", "task", "thread_id", "timeout_s", "who", "whom", "why")

    def __init__(self, who: str | None, whom: str, why: str, timeout_s: float | None, flag: str | None) -> None:
        self.task = _current_task()
        self.thread_id = threading.get_ident()
        path = _acting.get()
        if who is not None:
            path = (*path, who)
        self.path = path or (_own_name(self.task),)
        self.who = self.path[-1]
        self.whom = whom
        self.why = why
        self.timeout_s = timeout_s
        self.flag = timeout_s.flag if flag is None and isinstance(timeout_s, Limit) else flag
        self.began = time.monotonic()
        self.renewed: float | None = None
        self.deadline = None if timeout_s is None else self.began + timeout_s

    def renew(self) -> None:
        """Whoever is waited for got on with it: the deadline counts from now."""
        self.renewed = time.monotonic()
        if self.timeout_s is not None:
            self.deadline = self.renewed + self.timeout_s

    def remaining(self) -> float | None:
        """Seconds until the deadline, never less than 0; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def sentence(self) -> str:
        """The wait as the first line of an error."""
        now = time.monotonic()
        idle = "" if self.renewed is None else f", the last {now - self.renewed:.3g} s without progress"
        return f"{self.who} waited {now - self.began:.3g} s for {self.whom} {self.why}{idle}{in_brackets(self)}"


class Board:
    """The waits of a process by a number of their own."""

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
        """All waits of this moment, the oldest first."""
        return list(self._waits.copy().values())


board = Board()


@contextmanager
def waiting(
    whom: str, why: str, *, who: str | None = None, timeout_s: float | None, flag: str | None = None
) -> Iterator[Wait]:
    """Put a wait on the board while the body runs, which blocks for `wait.remaining()` at most.

    A body that runs out of time raises `expired(wait)`. `who` defaults to the name the code acts under (`acting_as`).
    """
    wait = Wait(who, whom, why, timeout_s, flag)
    number = board.enter(wait)
    try:
        yield wait
    finally:
        board.leave(number)


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """What the body waits for is waited for by `name`; tasks and `asyncio.to_thread` calls it starts inherit this."""
    token = _acting.set((*_acting.get(), name))
    try:
        yield
    finally:
        _acting.reset(token)


def named(coro: C, name: str) -> C:
    """The same coroutine under a name that says what it is for: whoever runs it elsewhere waits for this name."""
    if isinstance(coro, CoroutineType):
        coro.__qualname__ = name
    return coro


def name_of(coro: Coroutine[Any, Any, Any]) -> str:
    """What a coroutine is called: its function's name, or the one it was given."""
    return coro.__qualname__ if isinstance(coro, CoroutineType) else type(coro).__qualname__


def in_brackets(wait: Wait) -> str:
    """The flag that sets a wait's deadline, as the end of a sentence."""
    return "" if wait.flag is None else f" ({wait.flag})"


def _current_task() -> asyncio.Future[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def _own_name(task: asyncio.Future[Any] | None) -> str:
    """The name of code that nobody named: its task's, unless asyncio made it up, else its thread's."""
    if isinstance(task, asyncio.Task) and not task.get_name().startswith("Task-"):
        return task.get_name()
    thread = threading.current_thread()
    return "driver" if thread is threading.main_thread() else thread.name
