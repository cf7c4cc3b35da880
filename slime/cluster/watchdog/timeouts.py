"""What happens when a deadline passes: an error that says who waited for whom, and shows everybody's stacks.

The invariant: making the graph never blocks an event loop, and happens once for all that run out of time together.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from slime.cluster.watchdog.graph import describe
from slime.cluster.watchdog.registry import Wait, board, waiting
from slime.errors import RunFailed

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


# Asking a run what it waits for: SIGUSR1 prints the graph and goes on, SIGQUIT (Ctrl-\) prints it and ends it.
#
# The invariant: the graph is printed even if the main thread never comes back from where it hangs, because a thread of
# its own hears of the signal; ending the run needs the main thread, where the exception is raised. A second SIGQUIT
# ends the process at once, and its children end with it.

_PATIENCE_S = 10.0
_STDERR = 2


class WaitsShown(RunFailed):
    """The run was ended by SIGQUIT, after it had shown what it waited for."""


class _Watcher:
    """Reads signal numbers from the descriptor that the interpreter writes them to, and prints."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self.shown_before_end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="wait-signals", daemon=True)
        self._before_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._thread.start()

    def close(self) -> None:
        signal.set_wakeup_fd(self._before_fd)
        os.close(self._write_fd)
        self._thread.join(_PATIENCE_S)
        if not self._thread.is_alive():
            os.close(self._read_fd)

    def _watch(self) -> None:
        quits = 0
        while numbers := os.read(self._read_fd, 64):
            quits += numbers.count(signal.SIGQUIT)
            if quits > 1:  # the main thread never came back from the first
                os._exit(1)
            asked = {signal.SIGQUIT, signal.SIGUSR1} & set(numbers)
            if asked:
                text = reports.since(time.monotonic()).result()
                _print(text + "\n")
                logger.info("%s\n%s", " and ".join(sorted(signal.Signals(one).name for one in asked)), text)
                if signal.SIGQUIT in asked:
                    self.shown_before_end.set()


def ending_signals() -> tuple[signal.Signals, ...]:
    """What ends a process in order: SIGINT, SIGTERM, and SIGHUP unless it was started to ignore that (`nohup`)."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,)))


@contextmanager
def watch_signals() -> Iterator[None]:
    """Answer SIGUSR1 and SIGQUIT while the body runs; in other threads than the main one nothing is watched."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watcher = _Watcher()

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        watcher.shown_before_end.wait(_PATIENCE_S)
        raise WaitsShown("the run was ended by SIGQUIT; what it waited for is above and in the driver's log")

    before = {
        signal.SIGQUIT: signal.signal(signal.SIGQUIT, end),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, lambda number, frame: None),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        watcher.close()


def _print(text: str) -> None:
    """Past every buffer and lock: whoever holds them may be what hangs."""
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(_STDERR, data) :]
