"""Timeout errors with the wait-for graph and stacks, and signals that print the graph.

Invariants: making the graph never blocks an event loop, and waits that time out together share one graph.

SIGUSR1 prints the graph and the run continues; SIGQUIT (Ctrl-\\) prints it and ends the run. The graph is printed even
if the main thread never returns from where it hangs, because a separate thread receives the signal; ending the run
needs the main thread, where the exception is raised. A second SIGQUIT ends the process at once, and its children end
with it.
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
from slime.cluster.watchdog.registry import Wait, wait_registry, waiting
from slime.errors import RunFailed

T = TypeVar("T")

CANCEL_GRACE_S = 2.0
_REPORT_S = 30.0
_RECENT_S = 5.0
_LOG_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class WaitTimeout(RunFailed):
    """Raised when a wait exceeds its deadline; the message ends with the wait-for graph."""


class GraphReports:
    """The last wait-for graph, or the one that is being made in its own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = 0.0
        self._report: Future[str] | None = None
        self._logged = -_LOG_INTERVAL_S

    def since(self, moment: float) -> Future[str]:
        """Return a graph begun after `moment`: the last one if it is recent enough, else a new one."""
        with self._lock:
            if self._report is None or self._began < max(moment, time.monotonic() - _RECENT_S):
                self._began, self._report = time.monotonic(), Future()
                self._report.set_running_or_notify_cancel()  # a cancelled waiter does not cancel it
                work = (self._report, wait_registry.waits())
                threading.Thread(target=_make_report, args=work, name="wait-report", daemon=True).start()
            return self._report

    def log(self, reason: str, moment: float) -> Future[str] | None:
        """Log a graph with its reason; None if one was logged within the last minute."""
        with self._lock:
            now = time.monotonic()
            if now - self._logged < _LOG_INTERVAL_S:
                return None
            self._logged = now
        report = self.since(moment)
        report.add_done_callback(lambda report: logger.warning("%s\n%s", reason, report.result()))
        return report


reports = GraphReports()


def _make_report(report: Future[str], waits: list[Wait]) -> None:
    try:
        report.set_result(describe(waits))
    except BaseException as error:
        report.set_result(f"(the wait-for graph could not be made: {type(error).__name__}: {error})")
        raise


def expired(wait: Wait, kind: Callable[[str], WaitTimeout] = WaitTimeout, sentence: str | None = None) -> WaitTimeout:
    """Make the error of a registered wait that timed out; for threads, never on an event loop.

    `sentence` replaces "<who> waited <n> s for <whom> <why> (<flag>)".
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
    """Await under a deadline; on a timeout, cancel the awaitable and raise `WaitTimeout`.

    An awaitable that ignores its cancellation is abandoned. With `failure`, the timeout is the outcome of one sample
    among thousands: the exception that `failure` returns is raised, and the graph is logged once for all of them.
    """
    task = asyncio.ensure_future(awaitable)
    with waiting(whom, why, who=who, timeout_s=timeout_s, flag=flag) as wait:
        wait.task = task
        try:
            done, _ = await asyncio.wait((task,), timeout=timeout_s)
            if done:
                return task.result()
            if failure is not None:
                error = failure(wait)
                await log_graph(wait, str(error))
            else:
                sentence = wait.sentence()
                graph = await asyncio.wrap_future(reports.since(wait.began))
                error = WaitTimeout(f"{sentence}\n{graph}")
        except BaseException:
            await _cancel_task(task)
            raise
        await _cancel_task(task)
        raise error


async def log_graph(wait: Wait, reason: str) -> None:
    """Log the graph for waits that each fail one sample: once for all that fail in the same minute.

    The wait whose failure is logged stays registered until the graph is made.
    """
    report = reports.log(reason, wait.began)
    if report is not None:
        await asyncio.wrap_future(report)


async def _cancel_task(task: asyncio.Future[T]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_GRACE_S)
    if task.done() and not task.cancelled():
        task.exception()  # marks it as retrieved: no other code will


_SIGNAL_GRACE_S = 10.0
_STDERR = 2


class WaitsShown(RunFailed):
    """Raised when SIGQUIT ends the run, after the wait-for graph was printed."""


class _SignalWatcher:
    """Prints the graph for each signal number that the interpreter writes to its wake-up descriptor."""

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
        self._thread.join(_SIGNAL_GRACE_S)
        if not self._thread.is_alive():
            os.close(self._read_fd)

    def _watch(self) -> None:
        quits = 0
        while numbers := os.read(self._read_fd, 64):
            quits += numbers.count(signal.SIGQUIT)
            if quits > 1:  # the main thread did not handle the first
                os._exit(1)
            asked = {signal.SIGQUIT, signal.SIGUSR1} & set(numbers)
            if asked:
                text = reports.since(time.monotonic()).result()
                data = (text + "\n").encode(errors="replace")
                while data:  # without buffers and locks, which the stalled code may hold
                    data = data[os.write(_STDERR, data) :]
                logger.info("%s\n%s", " and ".join(sorted(signal.Signals(one).name for one in asked)), text)
                if signal.SIGQUIT in asked:
                    self.shown_before_end.set()


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that shut down a process: SIGINT, SIGTERM, and SIGHUP unless it is ignored (`nohup`)."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,)))


@contextmanager
def watch_signals() -> Iterator[None]:
    """Handle SIGUSR1 and SIGQUIT while the body runs; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watcher = _SignalWatcher()

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        watcher.shown_before_end.wait(_SIGNAL_GRACE_S)
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
