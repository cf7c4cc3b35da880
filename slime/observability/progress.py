"""What a person sees while a run goes on: a live table on a terminal, one line per event elsewhere.

The invariants: showing never decides anything. The driver reports the same events to every kind of display, and the one
that shows nothing is a display like the others. Whatever is shown is also in the driver's log. No display is silent for
longer than `QUIET_S` while the run lives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime.observability.logs import ON_SCREEN
from slime.observability.metric_format import (
    STEP_TIME,
    format_scores,
    format_seconds,
    format_when,
    step_line,
)

PLAIN_INTERVAL_S = 2.0
QUIET_S = 30.0
"""How long a display of lines may say nothing."""
_RESTING = {"", "idle", "done", "waiting", "ready"}

logger = logging.getLogger("slime.progress")


class Doing(NamedTuple):
    """What a part does, and whether that takes it any time."""

    text: str
    busy: bool = True


Source = Callable[[], tuple[str, bool] | None]
"""Asked whenever the display is drawn, so it answers at once: (what the part does now, whether it is busy), or None
when the last status still says it all."""


class Progress(Protocol):
    """The events of a run. `console` is where log messages may be printed without disturbing the display."""

    console: Console

    def status(self, part: str, text: str, *, busy: bool = True) -> None:
        """What a part (rollout, trainer, weights, ...) is doing now, or with what it is done."""

    def watch(self, part: str, source: Source) -> None:
        """Where to look up what a part is doing, while it does it."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A rollout has been generated and trained on."""

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """The score of each evaluation dataset, with the weights after `step` steps (0: before training)."""

    def message(self, text: str) -> None:
        """Something worth a line of its own."""

    def warn(self, text: str) -> None:
        """Something that the user should look at; it is shown whatever the display."""

    def close(self) -> None:
        """No more events. Safe to call again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


class NoProgress:
    """Shows nothing; the base of the others, which writes all events to the log."""

    def __init__(self, console: Console, total: int = 0) -> None:
        self.console = console
        self._total = total

    def status(self, part: str, text: str, *, busy: bool = True) -> None:
        logger.debug("%s: %s", part, text)

    def watch(self, part: str, source: Source) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        logger.info("%s", step_line(step, self._total, metrics))

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        logger.info("eval %s: %s", format_when(step), format_scores(scores))

    def message(self, text: str) -> None:
        logger.info("%s", text)

    def warn(self, text: str) -> None:
        logger.warning("%s", text)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass
class Part:
    """One row: the last status and when it came, and where to look up more."""

    text: str = ""
    busy: bool = False
    since_s: float = 0.0
    source: Source | None = None

    def doing(self) -> Doing:
        found = None if self.source is None else self.source()
        return Doing(self.text, self.busy and self.text not in _RESTING) if found is None else Doing(*found)


class Shown(NoProgress):
    """What the displays of lines and of a table have in common: the parts, and the clock of the steps."""

    def __init__(self, total: int, *, start: int, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, total)
        self._now = now
        self._clock = StepClock(total, start, now)
        self._parts: dict[str, Part] = {}
        self._lock = threading.RLock()

    def status(self, part: str, text: str, *, busy: bool = True) -> None:
        super().status(part, text)
        with self._lock:
            row = self._parts.setdefault(part, Part())
            row.busy = busy
            if row.text != text:
                row.text, row.since_s = text, self._now()

    def watch(self, part: str, source: Source) -> None:
        with self._lock:
            self._parts.setdefault(part, Part(since_s=self._now())).source = source

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().step(step, metrics)
        with self._lock:
            self._clock.advance(step, metrics.get(STEP_TIME))

    def warn(self, text: str) -> None:
        logger.warning("%s", text, extra={ON_SCREEN: True})  # the display shows it itself


class PlainProgress(Shown):
    """One line per event; what a part is doing is shown only until the first step, while there is nothing else, and
    whenever nothing was shown for `QUIET_S`.

    Of steps in quick succession one is shown every `PLAIN_INTERVAL_S` seconds, the first and the last always.
    """

    def __init__(self, total: int, *, start: int, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(total, start=start, console=console, now=now)
        self._shown_at_s: float | None = None
        self._held_back: str | None = None
        self._last_line_s = now()
        self._closed = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="progress", daemon=True)
        self._listener.start()

    def status(self, part: str, text: str, *, busy: bool = True) -> None:
        with self._lock:
            is_news = part not in self._parts or self._parts[part].text != text
            super().status(part, text, busy=busy)
            if self._clock.done == 0 and is_news:
                self._line(f"{part}: {text}")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        with self._lock:
            super().step(step, metrics)
            total, elapsed = self._clock.total, self._clock.elapsed_s
            room = self.console.width - len(f"[{format_seconds(elapsed)}] ") if self.console.is_terminal else None
            tail = f"  eta {format_seconds(self._clock.eta_s)}"
            self._held_back = step_line(step, total, metrics, width=room, tail=tail)
            is_last = step + 1 == total
            if is_last or self._shown_at_s is None or elapsed - self._shown_at_s >= PLAIN_INTERVAL_S:
                self._shown_at_s = elapsed
                self._show_held_back()

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        super().evaluation(step, scores)
        self._say(f"eval {format_when(step)}: {format_scores(scores)}")

    def message(self, text: str) -> None:
        super().message(text)
        self._say(text)

    def warn(self, text: str) -> None:
        super().warn(text)
        self._say(f"warning: {text}")

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._show_held_back()

    def speak_up(self) -> float:
        """Say what the parts are doing if nothing was said for long; how long that may be put off from now."""
        with self._lock:
            left = self._last_line_s + QUIET_S - self._now()
            if left > 0:
                return left
            self._show_held_back()
            self._line("; ".join(self._busy()) or "running")
            return QUIET_S

    def _busy(self) -> list[str]:
        lines = []
        for name, part in self._parts.items():
            doing = part.doing()
            if doing.busy:
                since = "" if doing.text != part.text else f" (for {format_seconds(self._now() - part.since_s)})"
                lines.append(f"{name}: {doing.text}{since}")
        return lines

    def _listen(self) -> None:
        wait_s = QUIET_S
        while not self._closed.wait(wait_s):
            wait_s = self.speak_up()

    def _say(self, text: str) -> None:
        with self._lock:
            self._show_held_back()
            self._line(text)

    def _show_held_back(self) -> None:
        line, self._held_back = self._held_back, None
        if line is not None:
            self._line(line)

    def _line(self, text: str) -> None:
        self._last_line_s = self._now()
        elapsed = format_seconds(self._clock.elapsed_s)
        self.console.print(Text(f"[{elapsed}] {text}"), soft_wrap=True)
        self.console.file.flush()


class StepClock:
    """Elapsed time, and the time left as the mean of the steps so far tells; start-up does not count."""

    def __init__(self, total: int, start: int, now: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.done = 0
        self._next = start
        self._now = now
        self._started = now()
        self._steps_began = self._started

    @property
    def position(self) -> int:
        """Rollouts behind us, those before a resume included."""
        return self._next

    @property
    def elapsed_s(self) -> float:
        return self._now() - self._started

    def advance(self, step: int, seconds: float | None) -> None:
        """A step is done that took `seconds`, if that is known."""
        if self.done == 0 and seconds is not None:
            self._steps_began = max(self._started, self._now() - seconds)
        self.done += 1
        self._next = step + 1

    @property
    def eta_s(self) -> float | None:
        if self.done == 0:
            return None
        return (self._now() - self._steps_began) / self.done * (self.total - self._next)


def print_summary(rows: Sequence[tuple[str, str]], *, title: str = "Summary", console: Console | None = None) -> None:
    """A two-column table at the end of a run."""
    console = console or Console(highlight=False)
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, min_width=40)
    table.add_column(style="cyan" if console.is_terminal else None, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)


# A word about work that turns out to take long, before there is a display: reading a large file of prompts, say.
#
# Invariant: quick work is not mentioned, and slow work is never silent for longer than a display of lines would be.

FIRST_S = 3.0


@contextmanager
def told_if_slow(what: str, *, silent: bool = False, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Say `what` after a few seconds, and then again and again, until the body is done; `silent` says nothing."""
    done = threading.Event()
    began = time.monotonic()
    tell = say or (lambda text: print(text, flush=True))

    def listen() -> None:
        wait_s = FIRST_S
        while not done.wait(wait_s):
            tell(f"[{format_seconds(time.monotonic() - began)}] {what}")
            wait_s = QUIET_S

    if not silent:
        threading.Thread(target=listen, name="patience", daemon=True).start()
    try:
        yield
    finally:
        done.set()
