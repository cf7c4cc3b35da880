"""An event loop in a thread of its own, so that synchronous code can drive asynchronous rollout.

Invariant: after `close` no task of the loop is left and its thread has ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


class LoopThread:
    """Owner of one background event loop."""

    def __init__(self, name: str = "slime-rollout") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait; on timeout or interrupt the coroutine is cancelled."""
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError(
                f"{self._thread.name}: run() called from the loop itself would wait forever; await instead"
            )
        if self.loop.is_closed():
            coro.close()
            raise RuntimeError(f"{self._thread.name}: the event loop is closed")
        future = asyncio.run_coroutine_threadsafe(coro, self.loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():  # the coroutine's own TimeoutError
                raise
            future.cancel()
            raise TimeoutError(f"{self._thread.name}: {coro!r} did not finish within {timeout:g} s") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs and end the thread; a second call does nothing."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name}: a task blocks the event loop and did not end")

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()
