"""Threads for plain functions that may hang: rewards, and whatever is given to `asyncio.to_thread`.

The invariant: no thread here keeps the process from ending, and a function that hangs takes nobody's place: a thread
that has been busy with one call for longer than `SLOW_S` no longer counts against the limit, and one whose call was
abandoned ends when that call does.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

SLOW_S = 5.0
MOST_THREADS = 1024
_LIMIT = min(32, (os.cpu_count() or 1) + 4)  # as many as asyncio gives to plain functions


class Job:
    """One call: its future, and when a thread took it up."""

    def __init__(self, function: Callable[[], Any], on_begin: Callable[[], None] | None = None) -> None:
        self.function = function
        self.on_begin = on_begin
        self.future: Future[Any] = Future()
        self.began: float | None = None
        self.is_abandoned = False


class DaemonThreads:
    """A pool of daemon threads, started when they are needed."""

    def __init__(self, name: str, limit: int = _LIMIT) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[Job] = deque()
        self._running: set[Job] = set()
        self._idle = 0
        self._is_closed = False

    def submit(self, function: Callable[[], Any], *, on_begin: Callable[[], None] | None = None) -> Job:
        """Have a thread call `function`, now or when one is free; `on_begin` is called there first."""
        job = Job(function, on_begin)
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: the threads were closed")
            self._queue.append(job)
            self._work.notify()
            self._grow()
        return job

    def grow(self) -> None:
        """Start threads for calls that wait behind slow ones."""
        with self._lock:
            self._grow()

    def abandon(self, job: Job) -> None:
        """Nobody wants the answer any more: a call not yet begun is dropped, a running one ends on its own."""
        with self._lock:
            job.is_abandoned = True
            if job in self._queue:
                self._queue.remove(job)
                job.future.cancel()
            self._running.discard(job)
            self._grow()

    def close(self) -> None:
        """Idle threads end now, busy ones after their call."""
        with self._lock:
            self._is_closed = True
            self._work.notify_all()

    def _grow(self) -> None:
        now = time.monotonic()
        busy = sum(now - (job.began or now) < SLOW_S for job in self._running)
        most = min(self._limit - busy, MOST_THREADS - len(self._running))
        for _ in range(min(len(self._queue) - self._idle, most - self._idle)):
            self._idle += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        """One thread; it is counted as idle from before its start until it takes up a call."""
        while (job := self._next()) is not None:
            if job.future.set_running_or_notify_cancel():
                _call(job)
            with self._lock:
                self._running.discard(job)
                if job.is_abandoned:
                    return
                self._idle += 1

    def _next(self) -> Job | None:
        with self._lock:
            while not self._queue:
                if self._is_closed:
                    self._idle -= 1
                    return None
                self._work.wait()
            self._idle -= 1
            job = self._queue.popleft()
            job.began = time.monotonic()
            self._running.add(job)
            return job


class DaemonExecutor(ThreadPoolExecutor):
    """Daemon threads in the form that an event loop takes for its default executor; starts none of its own."""

    def __init__(self, name: str = "slime-thread") -> None:
        super().__init__(max_workers=1)
        self._threads_of_ours = DaemonThreads(name)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads_of_ours.submit(partial(fn, *args, **kwargs)).future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Threads that are busy end with their call; nobody waits for them."""
        self._threads_of_ours.close()
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def _call(job: Job) -> None:
    try:
        if job.on_begin is not None:
            job.on_begin()
        result = job.function()
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
        job.future.set_exception(error)
    else:
        job.future.set_result(result)
