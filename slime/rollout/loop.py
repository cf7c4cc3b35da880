"""An event loop in a thread of its own, so that synchronous code can drive asynchronous rollout.

Invariant: after `close` no task of the loop is left and its thread has ended. Whoever waits for a coroutine here is on
the board of waits, and the coroutine's own waits are named after it; a thread that hangs in `asyncio.to_thread` keeps
neither the loop nor the process from ending.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from slime.rollout.threads import DaemonExecutor
from slime.waits import Wait, WaitTimeout, acting_as, expired, name_of, raise_failures, waiting

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
_LOOK_UP_S = 0.5
"""How often somebody who waits looks whether a background has died meanwhile."""


STALL_S = 600.0
"""How long a function may block the event loop until the run is given up."""


class LoopTimeout(WaitTimeout, TimeoutError):
    """A coroutine, or the end of the loop, did not come in time."""


class LoopThread:
    """Owner of one background event loop."""

    def __init__(self, name: str = "slime-rollout") -> None:
        self.loop = asyncio.new_event_loop()
        self._last_beat = time.monotonic()
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

    def _result(self, future: concurrent.futures.Future[T], wait: Wait) -> T:
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
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()


async def _acting(coro: Coroutine[Any, Any, T], name: str) -> T:
    with acting_as(name):
        return await coro
