"""How far a rank is with what it was asked to do, as whoever waits for it hears of it.

Invariant: every report says that a piece of work is done (a micro-batch, a tensor that was read, written or sent); none
comes by the clock, so a rank that hangs is silent. Reports are cheap: of many in quick succession one is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

BETWEEN_S = 1.0
"""At most one report in this many seconds; far less than any deadline."""


class Progress:
    """Made once for a rank and passed to whatever works there long; without `tell` nobody hears of it.

    `begin("reading weights: tensor", 310)`, then `tick()` after each: "reading weights: tensor 12 of 310".
    """

    def __init__(self, tell: Callable[[str], None] | None = None, *, between_s: float = BETWEEN_S) -> None:
        self._tell = tell
        self._between_s = between_s
        self._told_s = -float("inf")
        self._doing = ""
        self._done = 0
        self._total: int | None = None

    def begin(self, doing: str, total: int | None = None) -> None:
        """What comes next, in `total` pieces where their number is known; what went before is done."""
        self._doing, self._done, self._total = doing, 0, total
        self._report()

    def tick(self, count: int = 1) -> None:
        """So many pieces more are done."""
        self._done += count
        self._report()

    def over(self, items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
        """The same items; one is done when the next is asked for."""
        self.begin(doing, total)
        for item in items:
            yield item
            self.tick()

    def restart(self) -> None:
        """Another call is served: its first report is told at once."""
        self._told_s = -float("inf")

    @property
    def text(self) -> str:
        """What is done, and how much of it there is."""
        if self._total is not None:
            return f"{self._doing} {self._done} of {self._total}"
        return f"{self._doing} {self._done}" if self._done else self._doing

    def _report(self) -> None:
        if self._tell is None:
            return
        now = time.monotonic()
        if now - self._told_s >= self._between_s:
            self._told_s = now
            self._tell(self.text)
