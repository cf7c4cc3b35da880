"""How a run ends before its time: by a signal, or by a failure whose traceback belongs into the log."""

from __future__ import annotations

import logging
import os
import signal
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from slime.config import Config
from slime.config.start import continues_itself, find_start
from slime.errors import RunFailed, UserError
from slime.observe.progress import Progress
from slime.waits import ending_signals

logger = logging.getLogger(__name__)


@contextmanager
def terminated_like_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run the way Ctrl-C does: parts are stopped in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal((1, 2))
            logger.warning("SIGHUP (the terminal was closed): the run ends as on Ctrl-C; nohup or tmux keep it going")
        raise KeyboardInterrupt

    numbers = set(ending_signals()) - {signal.SIGINT}
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_closed_terminal(descriptors: Iterable[int]) -> None:
    """Let descriptors of a terminal that is gone lead nowhere: whatever a run prints while it ends must not raise."""
    for descriptor in descriptors:
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextmanager
def failures_with_context(config: Config, progress: Progress) -> Iterator[None]:
    """The traceback of what ends a run goes to the driver's log; the terminal gets the sentence."""
    try:
        yield
    except UserError:
        raise
    except RunFailed:
        logger.info("the run failed", exc_info=True)
        raise
    except KeyboardInterrupt:
        if continues_itself(config):
            progress.message(
                "interrupted: run the same command to resume from the last checkpoint"
                if find_start(config).resumes
                else "interrupted before the first checkpoint: the same command trains from the start, on the samples "
                "that the journal has"
            )
        raise
