"""Background threads and tasks whose failure is re-raised to waiters.

Invariant: the exception of a failed background is stored, with its traceback, until its owner closes it, and every
wait that calls `raise_failures` raises it. A cancelled or closed background is not a failure. Threads are daemons of
their own, not workers of a pool (such as anyio's), which a hanging one would keep and which the exit would wait for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from slime.cluster.watchdog.registry import acting_as, waiting
from slime.errors import RunFailed, UserError

logger = logging.getLogger(__name__)


class BackgroundDied(RunFailed):
    """Raised when a background thread or task fails with an unexpected exception."""


class Background:
    """A daemon thread, or a task of the running event loop; made by `background`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise the stored failure: a `RunFailed` or `UserError` as it is, any other exception with its traceback."""
        if self.error is None:
            return
        if isinstance(self.error, RunFailed | UserError):
            raise self.error
        text = "".join(traceback.format_exception(self.error))
        raise BackgroundDied(f"{self.name} died of {type(self.error).__name__}: {self.error}\n{text}") from self.error

    def is_alive(self) -> bool:
        if self._thread is not None:
            return self._thread.is_alive()
        return self._task is not None and not self._task.done()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; return True if it has."""
        assert self._thread is not None, "a task is ended with aclose"
        with waiting(self.name, "to end", timeout_s=timeout_s) as wait:
            self._thread.join(wait.remaining())
        return not self._thread.is_alive()

    def close(self) -> None:
        """Discard its failure: a past or later exception is not raised. Does not wait for a thread (see `join`)."""
        self._is_closed = True
        _failed_backgrounds.pop(id(self), None)

    async def aclose(self) -> None:
        """Cancel the task, wait for its end and discard its failure."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.close()

    def _record_failure(self, error: BaseException) -> None:
        self.error = error
        if self._is_closed:
            return
        _failed_backgrounds[id(self)] = self
        if isinstance(error, RunFailed | UserError):  # an expected error, which the next wait raises
            logger.info("%s ended", self.name, exc_info=error)
        else:
            logger.error("%s died", self.name, exc_info=error)

    def _run(self, target: Callable[[], None]) -> None:
        try:
            with acting_as(self.name):
                target()
        except BaseException as error:  # noqa: BLE001 - stored, and raised by the next wait
            self._record_failure(error)

    async def _await(self, coro: Coroutine[Any, Any, None]) -> None:
        try:
            with acting_as(self.name):
                await coro
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - stored, and raised by the next wait
            self._record_failure(error)


_failed_backgrounds: dict[int, Background] = {}


def background(name: str, target: Callable[[], None] | Coroutine[Any, Any, None]) -> Background:
    """Start a function in a daemon thread, or a coroutine as a task of the running event loop."""
    made = Background(name)
    if isinstance(target, Coroutine):
        made._task = asyncio.create_task(made._await(target), name=name)
    else:
        made._thread = threading.Thread(target=made._run, args=(target,), name=name, daemon=True)
        made._thread.start()
    return made


def raise_failures() -> None:
    """Raise the error of a background that died, if any; waits for other things call this."""
    for dead in list(_failed_backgrounds.copy().values()):
        dead.check()


class Repeated:
    """A daemon thread that calls a function until `stop`: first after `interval_s`, then when the function says, which
    may return the seconds until its next call, or again after `interval_s`."""

    def __init__(self, name: str, act: Callable[[], float | None], interval_s: float) -> None:
        self._stopped = threading.Event()

        def repeat() -> None:
            wait_s: float | None = None
            while not self._stopped.wait(interval_s if wait_s is None else wait_s):
                wait_s = act()

        self._thread = threading.Thread(target=repeat, name=name, daemon=True)
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """End the thread and wait for its end. Idempotent."""
        self._stopped.set()
        self._thread.join()
