"""Work beside the main line whose death is nobody's secret.

The invariant: a background that raised is remembered, with its traceback, until its owner closes it, and every wait
that asks (`raise_failures`) raises it. One that was cancelled or closed has ended as it should.
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
    """A background thread or task raised something that nobody foresaw."""


class Background:
    """A daemon thread, or a task of the running event loop; made by `background`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise what ended it: a sentence of ours as it is, anything else with its traceback."""
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
        """Wait until a thread has ended; whether it has."""
        assert self._thread is not None, "a task is ended with aclose"
        with waiting(self.name, "to end", timeout_s=timeout_s) as wait:
            self._thread.join(wait.remaining())
        return not self._thread.is_alive()

    def close(self) -> None:
        """Forget it: what it died or dies of is no longer raised. A thread is not waited for, see `join`."""
        self._is_closed = True
        _failed.pop(id(self), None)

    async def aclose(self) -> None:
        """Cancel a task, wait for its end and forget it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.close()

    def _died(self, error: BaseException) -> None:
        self.error = error
        if self._is_closed:
            return
        _failed[id(self)] = self
        if isinstance(error, RunFailed | UserError):  # a sentence, which whoever waits next raises
            logger.info("%s ended", self.name, exc_info=error)
        else:
            logger.error("%s died", self.name, exc_info=error)

    def _run(self, target: Callable[[], None]) -> None:
        try:
            with acting_as(self.name):
                target()
        except BaseException as error:  # noqa: BLE001 - kept, and raised by whoever waits next
            self._died(error)

    async def _await(self, coro: Coroutine[Any, Any, None]) -> None:
        try:
            with acting_as(self.name):
                await coro
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - kept, and raised by whoever waits next
            self._died(error)


_failed: dict[int, Background] = {}


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
    """Raise the error of a background that died, if there is one: for whoever waits for something else."""
    for dead in list(_failed.copy().values()):
        dead.check()
