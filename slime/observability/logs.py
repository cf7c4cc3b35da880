"""Logging of one process.

Invariant: everything goes to the process's own log; the terminal shows only warnings, and each of them once. The stdout
and stderr of a child are redirected to its log file, so it logs to stderr; the driver writes `logs/<name>.log` itself.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_HANDLER_PREFIX = "slime-"
ON_SCREEN = "on_screen"
"""Attribute of a record that the display shows itself: the console handler skips it."""
_MOST_KNOWN_TEXTS, _MOST_SHOWN = 10_000, 5
_NOISY_LOGGERS = ("aiohttp.access", "asyncio", "matplotlib", "urllib3", "httpx", "filelock", "PIL")


def configure_logging(
    run_dir: str | os.PathLike[str] | None,
    process_name: str,
    level: str = "info",
    *,
    console: Console | None = None,
) -> Path | None:
    """Set up the root logger and return the log file.

    Without `run_dir` (a child) all records go to stderr. With it (the driver) they go to `<run_dir>/logs/<name>.log`,
    and warnings also to `console`, above the live display if there is one. A second call replaces the earlier setup.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if (handler.name or "").startswith(_HANDLER_PREFIX)]:
        root.removeHandler(handler)
        handler.close()
    threshold = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(threshold)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))
    logging.captureWarnings(False)  # other code may have restored the hook since an earlier run in this process
    logging.captureWarnings(True)
    if run_dir is None:
        _add(root, logging.StreamHandler(sys.stderr), "stderr", logging.Formatter(_FORMAT))
        return None
    log_path = Path(run_dir) / "logs" / f"{process_name}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    _add(root, logging.FileHandler(log_path, encoding="utf-8"), "file", logging.Formatter(_FORMAT))
    if console is not None and console.is_terminal:
        terminal: logging.Handler = RichHandler(
            console=console, show_path=False, show_time=False, markup=False, highlighter=NullHighlighter()
        )
        _add(root, terminal, "console", SentenceFormatter("%(message)s", log_path), logging.WARNING)
    else:
        layout = SentenceFormatter("%(levelname)s: %(message)s", log_path)
        _add(root, logging.StreamHandler(sys.stderr), "console", layout, logging.WARNING)
    return log_path


class SentenceFormatter(logging.Formatter):
    """Formats a record for the terminal: the message, and the path of the log instead of a traceback."""

    def __init__(self, layout: str, log_path: Path) -> None:
        super().__init__(layout)
        self._log_path = log_path

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        return self.formatMessage(record) + (f" (traceback in {self._log_path})" if record.exc_info else "")


class RepeatFilter(logging.Filter):
    """Passes each text once, and counts its repetitions."""

    def __init__(self) -> None:
        super().__init__()
        self.again: Counter[str] = Counter()
        self._known: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - the handler reports it, and nothing raises into the caller
            return True
        if text in self._known:
            self.again[text] += 1
            return False
        if len(self._known) < _MOST_KNOWN_TEXTS:
            self._known.add(text)
        return True


def repeated_warnings() -> list[str]:
    """Return a line for each text that was logged several times and shown once; the log file has all of them."""
    filters = [
        one for handler in logging.getLogger().handlers for one in handler.filters if isinstance(one, RepeatFilter)
    ]
    return [f"{count} more times: {text}" for once in filters for text, count in once.again.most_common(_MOST_SHOWN)]


def _add(
    root: logging.Logger, handler: logging.Handler, name: str, layout: logging.Formatter, level: int = logging.NOTSET
) -> None:
    handler.set_name(_HANDLER_PREFIX + name)
    if name == "console":
        handler.addFilter(lambda record: not hasattr(record, ON_SCREEN))
        handler.addFilter(RepeatFilter())
    handler.setFormatter(layout)
    handler.setLevel(level)
    root.addHandler(handler)
