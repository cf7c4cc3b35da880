"""Runs an event loop in its own thread, and plain functions that may hang in daemon threads.

Synchronous code drives asynchronous rollout through the loop. The daemon threads run functions of the user and calls of
`asyncio.to_thread`.

Invariant: after `close` no task of the loop is left and its thread has ended. A wait for a coroutine is registered in
the registry of waits, and the coroutine's own waits carry its name. No thread of a plain function keeps the loop or the
process from ending. A function that hangs does not block others: a thread busy with one call for longer than `SLOW_S`
no longer counts against the limit, and a thread whose call was cancelled ends with that call.
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
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from slime.cluster.watchdog import Wait, WaitTimeout, acting_as, expired, name_of, raise_failures, waiting

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.5
"""Interval at which a waiting thread checks whether a background task has died."""
STALL_S = 600.0
"""Time for which a function may block the event loop before the run fails."""
SLOW_S = 5.0
MOST_THREADS = 1024
_LIMIT = min(32, (os.cpu_count() or 1) + 4)  # the limit of asyncio for plain functions


class LoopTimeout(WaitTimeout, TimeoutError):
    """A coroutine or the event loop did not end in time."""


class LoopThread:
    """Owns an event loop that runs in a background thread."""

    def __init__(self, name: str = "slime-rollout") -> None:
        self.loop = asyncio.new_event_loop()
        self._last_beat = time.monotonic()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[object, object, T], timeout: float | None = None, *, whom: str | None = None) -> T:
        """Run a coroutine on the loop and wait for it; on timeout or interrupt the coroutine is cancelled.

        `whom` names the work that is waited for ("rollout 3"); it defaults to the coroutine's name.
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

        async def act() -> T:
            with acting_as(name):
                return await coro

        future = asyncio.run_coroutine_threadsafe(act(), self.loop)
        try:
            with waiting(name, "to finish", timeout_s=timeout) as wait:
                return self._result(future, wait)
        except BaseException:
            future.cancel()
            raise

    def _result(self, future: Future[T], wait: Wait) -> T:
        while True:
            left = wait.remaining()
            done, _ = concurrent.futures.wait(
                [future], _POLL_INTERVAL_S if left is None else min(left, _POLL_INTERVAL_S)
            )
            if done:
                return future.result()
            if wait.is_over():
                sentence = f"{self._thread.name}: {wait.whom} did not finish within {wait.timeout_s:g} s"
                raise expired(wait, LoopTimeout, sentence)
            raise_failures()
            # deadlines of tasks do not fire while something blocks the loop, so a blocked loop has its own deadline
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
        """Cancel running tasks and end the thread; a second call does nothing."""
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
            while not self._is_closing:
                try:
                    self.loop.run_forever()
                except SystemExit as error:  # the loop also serves other tasks
                    logger.error("%s: a task called sys.exit(%r): only that task ends", self._thread.name, error.code)
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results in order; on an error the others are cancelled and awaited before it is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Call(Future[Any]):
    """One call in a thread. Cancelling it removes a queued call, and abandons the thread of a running one."""

    def __init__(
        self, function: Callable[[], object], threads: DaemonThreads, on_begin: Callable[[], None] | None
    ) -> None:
        super().__init__()
        self._function, self._on_begin, self._threads = function, on_begin, threads
        self.began: float | None = None  # when a thread started it (time.monotonic)
        self.is_abandoned = False

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        self._threads.give_up(self)
        return is_cancelled

    def act(self) -> None:
        """Call the function in this thread and set the result."""
        try:
            if self._on_begin is not None:
                self._on_begin()
            result = self._function()
        except StopIteration as error:  # a future cannot hold it, and its waiter would hang
            self.set_exception(RuntimeError(f"raised {error!r}"))
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller
            self.set_exception(error)
        else:
            self.set_result(result)


class DaemonThreads:
    """Pool of daemon threads that are started on demand."""

    def __init__(self, name: str, limit: int = _LIMIT) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._closing = threading.Condition(self._lock)
        self._queue: deque[Call] = deque()
        self._running: set[Call] = set()
        self._idle = 0
        self._is_closed = self._is_watched = False

    def submit(self, function: Callable[[], object], *, on_begin: Callable[[], None] | None = None) -> Call:
        """Call `function` in a thread, now or when one is free; `on_begin` is called there first."""
        call = Call(function, self, on_begin)
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: the threads were closed")
            self._queue.append(call)
            self._work.notify()
            self._grow()
            if len(self._queue) > self._idle and not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name=f"{self._name}-queue", daemon=True).start()
        return call

    async def begin(self, function: Callable[[], T], who: str) -> asyncio.Future[T]:
        """Wait until a thread starts `function` in the current context, and return the future of its result.

        Cancelling that future abandons the call: it runs to its end, and its result and error are ignored.
        """
        loop = asyncio.get_running_loop()
        begun = loop.create_future()

        def note_begin() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if begun.done() else begun.set_result(None))

        call = self.submit(partial(contextvars.copy_context().run, function), on_begin=note_begin)
        future: asyncio.Future[T] = asyncio.wrap_future(call)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # an ignored error is not logged
        try:
            with waiting(who, "to be called after earlier calls", timeout_s=None):
                await asyncio.wait((begun, future), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            future.cancel()
            raise
        return future

    def give_up(self, call: Call) -> None:
        """Abandon a call: a queued one is removed, a running one ends on its own."""
        with self._lock:
            call.is_abandoned = True
            if call in self._queue:
                self._queue.remove(call)
            self._running.discard(call)
            self._grow()

    def close(self) -> None:
        """End idle threads now, and busy ones after their call."""
        with self._lock:
            self._is_closed = True
            self._work.notify_all()
            self._closing.notify_all()

    def _grow(self) -> None:
        now = time.monotonic()
        busy = sum(now - (call.began or now) < SLOW_S for call in self._running)
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
        """Start threads for calls that wait behind slow ones, until none is waiting."""
        with self._lock:
            while len(self._queue) > self._idle and not self._is_closed:
                self._closing.wait(_POLL_INTERVAL_S)
                self._grow()
            self._is_watched = False

    def _serve(self) -> None:
        """Run queued calls in one thread, which counts as idle from before its start until it takes a call."""
        while True:
            with self._lock:
                while not self._queue:
                    if self._is_closed:
                        self._idle -= 1
                        return
                    self._work.wait()
                self._idle -= 1
                call = self._queue.popleft()
                call.began = time.monotonic()
                self._running.add(call)
            if call.set_running_or_notify_cancel():
                call.act()
            with self._lock:
                self._running.discard(call)
                if call.is_abandoned:
                    return
                self._idle += 1


class DaemonExecutor(ThreadPoolExecutor):
    """Adapts `DaemonThreads` to the default executor of an event loop; starts no threads of its own."""

    def __init__(self, name: str = "slime-thread") -> None:
        super().__init__(max_workers=1)
        self._threads_of_ours = DaemonThreads(name)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads_of_ours.submit(partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads without waiting; busy ones end with their call."""
        self._threads_of_ours.close()
        super().shutdown(wait=False, cancel_futures=cancel_futures)
