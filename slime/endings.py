"""How a run ends before its time: by a signal, or by a failure whose traceback belongs into the log."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from slime.config import Config
from slime.config.start import continues_itself
from slime.errors import RunFailed, UserError
from slime.observe.progress import Progress

logger = logging.getLogger(__name__)


@contextmanager
def terminated_like_interrupt() -> Iterator[None]:
    """SIGTERM ends the run the way Ctrl-C does: parts are stopped in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
            progress.message("interrupted; the same command goes on from the last checkpoint")
        raise
