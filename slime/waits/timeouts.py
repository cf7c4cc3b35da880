"""What happens when a deadline passes: an error that says who waited for whom, and shows everybody's stacks.

The invariant: making the graph never blocks an event loop, and happens once for all that run out of time together.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from slime.errors import RunFailed
from slime.waits.board import Wait, board, waiting
from slime.waits.graph import describe

T = TypeVar("T")

CANCEL_GRACE_S = 2.0
_REPORT_S = 30.0
_NEW_ENOUGH_S = 5.0
_BETWEEN_LOGGED_S = 60.0

logger = logging.getLogger(__name__)


class WaitTimeout(RunFailed):
    """A wait outlasted its deadline; the message ends with the wait-for graph."""


class Reports:
    """Graphs that are being made or were made last, each in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = 0.0
        self._report: Future[str] | None = None
        self._logged = -_BETWEEN_LOGGED_S

    def since(self, moment: float) -> Future[str]:
        """A graph begun after `moment`: the last one if it is new enough, else a new one."""
        with self._lock:
            if self._report is None or self._began < max(moment, time.monotonic() - _NEW_ENOUGH_S):
                self._began, self._report = time.monotonic(), Future()
                self._report.set_running_or_notify_cancel()  # whoever stops waiting for it does not stop it
                work = (self._report, board.waits())
                threading.Thread(target=_make, args=work, name="wait-report", daemon=True).start()
            return self._report

    def log(self, reason: str, moment: float) -> Future[str] | None:
        """Write a graph into the log beside the reason for it; None if that was done a short while ago."""
        with self._lock:
            now = time.monotonic()
            if now - self._logged < _BETWEEN_LOGGED_S:
                return None
            self._logged = now
        report = self.since(moment)
        report.add_done_callback(lambda report: logger.warning("%s\n%s", reason, report.result()))
        return report


reports = Reports()


def _make(report: Future[str], waits: list[Wait]) -> None:
    try:
        report.set_result(describe(waits))
    except BaseException as error:
        report.set_result(f"(the wait-for graph could not be made: {type(error).__name__}: {error})")
        raise


def expired(wait: Wait, kind: Callable[[str], WaitTimeout] = WaitTimeout, sentence: str | None = None) -> WaitTimeout:
    """The error of a wait that is still on the board and ran out of time; for threads, never on an event loop.

    `sentence` takes the place of "<who> waited <n> s for <whom> <why> (<flag>)".
    """
    try:
        graph = reports.since(wait.began).result(_REPORT_S)
    except TimeoutError:
        graph = "(the wait-for graph could not be made in time)"
    return kind(f"{sentence or wait.sentence()}\n{graph}")


async def wait_for(
    awaitable: Awaitable[T],
    whom: str,
    why: str,
    *,
    who: str | None = None,
    timeout_s: float | None,
    flag: str | None = None,
    failure: Callable[[Wait], Exception] | None = None,
) -> T:
    """Await under a deadline, at which the awaitable is cancelled and `WaitTimeout` raised.

    What does not heed its cancellation is left behind. With `failure` the deadline is the outcome of one sample among
    thousands: what that makes is raised, and the graph goes to the log, once for all of them.
    """
    task = asyncio.ensure_future(awaitable)
    with waiting(whom, why, who=who, timeout_s=timeout_s, flag=flag) as wait:
        wait.task = task
        try:
            done, _ = await asyncio.wait((task,), timeout=timeout_s)
            if done:
                return task.result()
            error = await _failed(wait, failure)
        except BaseException:
            await _end(task)
            raise
        await _end(task)
        raise error


async def _failed(wait: Wait, failure: Callable[[Wait], Exception] | None) -> Exception:
    if failure is not None:
        error = failure(wait)
        await log_graph(wait, str(error))
        return error
    sentence = wait.sentence()
    graph: str = await asyncio.wrap_future(reports.since(wait.began))
    return WaitTimeout(f"{sentence}\n{graph}")


async def log_graph(wait: Wait, reason: str) -> None:
    """Log the graph for waits that end in the failure of one sample each: once for all that fail in the same minute.

    The one whose failure is logged stays where it waits until the graph is made.
    """
    report = reports.log(reason, wait.began)
    if report is not None:
        await asyncio.wrap_future(report)


async def _end(task: asyncio.Future[T]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_GRACE_S)
    if task.done() and not task.cancelled():
        task.exception()  # seen: nobody else will ask for it
