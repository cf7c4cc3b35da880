"""An event loop in a thread of its own, so that synchronous code can drive asynchronous rollout, and threads for plain
functions that may hang: functions of the user, and whatever is given to `asyncio.to_thread`.

Invariant: after `close` no task of the loop is left and its thread has ended. Whoever waits for a coroutine here is on
the board of waits, and the coroutine's own waits are named after it. No thread for a plain function keeps the loop or
the process from ending, and a function that hangs takes nobody's place: a thread that has been busy with one call for
longer than `SLOW_S` no longer counts against the limit, and one whose call was cancelled ends when that call does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from slime.cluster.watchdog import Wait, WaitTimeout, acting_as, expired, name_of, raise_failures, waiting

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
_LOOK_UP_S = 0.5
"""How often somebody who waits looks whether a background has died meanwhile."""
STALL_S = 600.0
"""How long a function may block the event loop until the run is given up."""
SLOW_S = 5.0
MOST_THREADS = 1024
_LIMIT = min(32, (os.cpu_count() or 1) + 4)  # as many as asyncio gives to plain functions


class LoopTimeout(WaitTimeout, TimeoutError):
    """A coroutine, or the end of the loop, did not come in time."""


class LoopThread:
    """Owner of one background event loop."""

    def __init__(self, name: str = "slime-rollout") -> None:
        self.loop = asyncio.new_event_loop()
        self._last_beat = time.monotonic()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[Any, Any, T], timeout: float | None = None, *, whom: str | None = None) -> T:
        """Run a coroutine on the loop and wait; on timeout or interrupt the coroutine is cancelled.

        `whom` says what is waited for ("rollout 3"); it defaults to the coroutine's name.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError(
                f"{self._thread.name}: run() called from the loop itself would wait forever; await instead"
            )
        if self.loop.is_closed():
            coro.close()
            raise RuntimeError(f"{self._thread.name}: the event loop is closed")
        name = name_of(coro) if whom is None else whom
        future = asyncio.run_coroutine_threadsafe(_acting(coro, name), self.loop)
        try:
            with waiting(name, "to finish", timeout_s=timeout) as wait:
                return self._result(future, wait)
        except BaseException:
            future.cancel()
            raise

    def _result(self, future: Future[T], wait: Wait) -> T:
        while True:
            left = wait.remaining()
            done, _ = concurrent.futures.wait([future], _LOOK_UP_S if left is None else min(left, _LOOK_UP_S))
            if done:
                return future.result()
            if wait.is_over():
                sentence = f"{self._thread.name}: {wait.whom} did not finish within {wait.timeout_s:g} s"
                raise expired(wait, LoopTimeout, sentence)
            raise_failures()
            self._refuse_stall(wait)

    def _refuse_stall(self, wait: Wait) -> None:
        """No deadline of a task is kept while something blocks the loop itself: that has one of its own."""
        self.loop.call_soon_threadsafe(self._beat)
        if time.monotonic() - max(self._last_beat, wait.began) > STALL_S:
            sentence = (
                f"{self._thread.name}: something has blocked the event loop for {STALL_S:g} s; an async function "
                "must not wait without await"
            )
            raise expired(wait, LoopTimeout, sentence)

    def _beat(self) -> None:
        self._last_beat = time.monotonic()

    def close(self) -> None:
        """Cancel what still runs and end the thread; a second call does nothing."""
        if self.loop.is_closed():
            return
        self._is_closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        with waiting(self._thread.name, "to end", timeout_s=CLOSE_TIMEOUT_S) as wait:
            self._thread.join(wait.remaining())
            if self._thread.is_alive():
                sentence = f"{self._thread.name}: a task blocks the event loop and did not end"
                raise expired(wait, LoopTimeout, sentence)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_default_executor(DaemonExecutor())
        try:
            self._run_on()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def _run_on(self) -> None:
        """Until the loop is closed: whoever calls sys.exit in a task ends that task, not everybody's loop."""
        while not self._is_closing:
            try:
                self.loop.run_forever()
            except SystemExit as error:
                logger.error("%s: a task called sys.exit(%r): only that task ends", self._thread.name, error.code)


async def _acting(coro: Coroutine[Any, Any, T], name: str) -> T:
    with acting_as(name):
        return await coro


class Job:
    """One call: its future, and when a thread took it up."""

    def __init__(
        self, function: Callable[[], Any], threads: DaemonThreads, on_begin: Callable[[], None] | None
    ) -> None:
        self.function = function
        self.on_begin = on_begin
        self.future = JobFuture(self, threads)
        self.began: float | None = None
        self.is_abandoned = False


class JobFuture(Future[Any]):
    """The result of a call. Cancelled, it drops a call that has not begun; the thread of a running one is given up."""

    def __init__(self, job: Job, threads: DaemonThreads) -> None:
        super().__init__()
        self._job = job
        self._threads = threads

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        self._threads.give_up(self._job)
        return is_cancelled


class DaemonThreads:
    """A pool of daemon threads, started when they are needed."""

    def __init__(self, name: str, limit: int = _LIMIT) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._closing = threading.Condition(self._lock)
        self._queue: deque[Job] = deque()
        self._running: set[Job] = set()
        self._idle = 0
        self._is_closed = self._is_watched = False

    def submit(self, function: Callable[[], Any], *, on_begin: Callable[[], None] | None = None) -> Job:
        """Have a thread call `function`, now or when one is free; `on_begin` is called there first."""
        job = Job(function, self, on_begin)
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: the threads were closed")
            self._queue.append(job)
            self._work.notify()
            self._grow()
            if len(self._queue) > self._idle and not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name=f"{self._name}-queue", daemon=True).start()
        return job

    async def begin(self, function: Callable[[], Any], who: str) -> asyncio.Future[Any]:
        """Wait until a thread takes up `function`, in this context; the future of its result.

        Whoever cancels that future leaves the call behind: it ends on its own, and nobody hears of it.
        """
        begun = asyncio.get_running_loop().create_future()
        job = self.submit(partial(contextvars.copy_context().run, function), on_begin=partial(_set_from_thread, begun))
        future = asyncio.wrap_future(job.future)
        future.add_done_callback(_see_error)
        try:
            with waiting(who, "to be called, behind others", timeout_s=None):
                await asyncio.wait((begun, future), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            future.cancel()
            raise
        return future

    def give_up(self, job: Job) -> None:
        """Nobody wants the result any more: a call not yet begun is dropped, a running one ends on its own."""
        with self._lock:
            job.is_abandoned = True
            if job in self._queue:
                self._queue.remove(job)
            self._running.discard(job)
            self._grow()

    def close(self) -> None:
        """Idle threads end now, busy ones after their call."""
        with self._lock:
            self._is_closed = True
            self._work.notify_all()
            self._closing.notify_all()

    def _grow(self) -> None:
        now = time.monotonic()
        busy = sum(now - (job.began or now) < SLOW_S for job in self._running)
        most = min(self._limit - busy, MOST_THREADS - len(self._running))
        for _ in range(min(len(self._queue) - self._idle, most - self._idle)):
            self._idle += 1
            try:
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            except RuntimeError as error:  # the system has no more threads; `_watch` tries again
                self._idle -= 1
                logger.warning("%s: %s: %d calls wait", self._name, error, len(self._queue))
                return

    def _watch(self) -> None:
        """Start threads for calls that wait behind slow ones, until none waits."""
        with self._lock:
            while len(self._queue) > self._idle and not self._is_closed:
                self._closing.wait(_LOOK_UP_S)
                self._grow()
            self._is_watched = False

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


def _see_error(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _set_from_thread(future: asyncio.Future[None]) -> None:
    """Complete a future of an event loop from another thread; one whose loop was closed needs nothing."""
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))


def _call(job: Job) -> None:
    try:
        if job.on_begin is not None:
            job.on_begin()
        result = job.function()
    except StopIteration as error:  # a future cannot hold it, so whoever asked would wait for ever
        job.future.set_exception(RuntimeError(f"raised {error!r}"))
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
        job.future.set_exception(error)
    else:
        job.future.set_result(result)
