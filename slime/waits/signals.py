r"""Asking a run what it waits for: SIGUSR1 prints the graph and goes on, SIGQUIT (Ctrl-\) prints it and ends it.

The invariant: the graph is printed even if the main thread never comes back from where it hangs, because a thread of
its own hears of the signal; ending the run needs the main thread, where the exception is raised. A second SIGQUIT ends
the process at once, and its children end with it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from slime.errors import RunFailed
from slime.waits.timeouts import reports

_PATIENCE_S = 10.0
_STDERR = 2

logger = logging.getLogger(__name__)


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
