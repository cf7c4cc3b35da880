"""The pictures of a run while it goes on.

Invariant: drawing takes no time of the driver. A process of its own, with the lowest priority, draws at most once every
`interval_s`; it is never waited for until the run is over, and none outlives the run.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slime.cluster.secrets import without_secrets
from slime.observe import plots

INTERVAL_S = 60.0
FIRST_S = 20.0
_PACKAGE_ROOT = str(Path(__file__).parents[2])

logger = logging.getLogger(__name__)


class Curves:
    """`reward.png` (and `loss.png`) beside `metrics.jsonl`."""

    def __init__(
        self,
        metrics: Path,
        *,
        first_s: float = FIRST_S,
        interval_s: float = INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self._now = now
        self._due = now() + first_s
        self._drawing: subprocess.Popen[bytes] | None = None
        self._finished: dict[str, Path] | None = None

    def redraw(self) -> bool:
        """Have the pictures drawn anew if they are old; whether it was begun."""
        if self._now() < self._due or (self._drawing is not None and self._drawing.poll() is None):
            return False
        self._due = self._now() + self._interval_s
        paths = filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")])
        self._drawing = subprocess.Popen(
            [sys.executable, "-P", "-m", plots.__name__, self._metrics, self._metrics.parent, self._title],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**without_secrets(os.environ), "PYTHONPATH": os.pathsep.join(paths)},
        )
        return True

    def stop(self) -> None:
        """End a drawing that is under way. Safe to call again."""
        if self._drawing is not None:
            self._drawing.kill()
            self._drawing.wait()
            self._drawing = None

    def finish(self) -> dict[str, Path]:
        """The last pictures, drawn now, by name; none for a run that has nothing to show. Once is enough."""
        self.stop()
        if self._finished is None:
            self._finished = {}
            try:
                self._finished = plots.draw_curves(self._metrics, self._metrics.parent, self._title)
            except OSError as error:
                logger.warning("the curves of this run could not be drawn: %s", error)
        return self._finished

    @property
    def _title(self) -> str:
        return self._metrics.parent.name
