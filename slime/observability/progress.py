"""Progress displays of a run: a live table on a terminal, one line per event elsewhere.

Invariants: a display decides nothing. The driver reports the same events to every kind of display; the one that shows
nothing has the same interface. Everything that is shown is also in the driver's log. No other display is silent for
longer than `QUIET_S` during the run. Before there is a display, slow start-up work prints a notice (`notify_if_slow`):
quick work is not mentioned, and slow work is not silent for longer than a display of lines would be.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slime.cluster.watchdog.background import Repeated
from slime.config import Config
from slime.observability.logs import ON_SCREEN
from slime.observability.metric_format import (
    COLUMNS,
    STEP_TIME,
    columns_that_fit,
    figures_of,
    format_scores,
    format_seconds,
    format_when,
    known,
    step_line,
)
from slime.storage.json_types import JsonMapping

FIRST_S = 3.0
"""Seconds until the first notice about slow start-up work."""
PLAIN_INTERVAL_S = 2.0
"""Least seconds between two steps that a display of lines shows."""
QUIET_S = 30.0
"""Longest time in seconds without a line on a display of lines."""
_SHOWN_STEPS = 8
_GAP = 2
_IDLE_TEXTS = {"", "idle", "done", "waiting", "ready"}

logger = logging.getLogger("slime.progress")


Source = Callable[[], tuple[str, bool] | None]
"""Returns (activity, is busy) of a part, or None if the last status is current. It is called whenever the display is
drawn, so it must return at once."""


class Progress:
    """Receives the events of a run and writes them to the log; shows nothing, and is the base of the displays.

    Log messages are printed to `console`, which does not disturb a display.
    """

    def __init__(self, console: Console, total: int = 0) -> None:
        self.console = console
        self._total = total

    def status(self, part: str, text: str, *, busy: bool = True) -> None:
        """Report the activity of a part (rollout, trainer, weights, ...), or its result."""
        logger.debug("%s: %s", part, text)

    def watch(self, part: str, source: Source) -> None:
        """Register the function that returns the present activity of a part."""

    def step(self, step: int, metrics: JsonMapping) -> None:
        """Report a rollout that has been generated and trained on."""
        logger.info("%s", step_line(step, self._total, metrics))

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Report the score of each evaluation dataset, with the weights after `step` steps (0: before training)."""
        logger.info("eval %s: %s", format_when(step), format_scores(scores))

    def message(self, text: str) -> None:
        """Print an informational line."""
        logger.info("%s", text)

    def warn(self, text: str) -> None:
        """Print a warning for the user; every display shows it."""
        logger.warning("%s", text)

    def close(self) -> None:
        """End the display. Safe to call again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass
class ProgressRow:
    """One row: the last status and its time, and the source of the present activity."""

    text: str = ""
    busy: bool = False
    since_s: float = 0.0
    source: Source | None = None

    def doing(self) -> tuple[str, bool]:
        """Return the present activity, and whether the part is busy."""
        found = None if self.source is None else self.source()
        return (self.text, self.busy and self.text not in _IDLE_TEXTS) if found is None else found


class TrackedProgress(Progress):
    """Base of the displays of lines and of a table: the rows of the parts, and the clock of the steps."""

    def __init__(self, total: int, *, start: int, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, total)
        self._now = now
        self._clock = StepClock(total, start, now)
        self._parts: dict[str, ProgressRow] = {}
        self._lock = threading.RLock()

    def status(self, part: str, text: str, *, busy: bool = True) -> None:
        super().status(part, text)
        with self._lock:
            row = self._parts.setdefault(part, ProgressRow())
            row.busy = busy
            if row.text != text:
                row.text, row.since_s = text, self._now()

    def watch(self, part: str, source: Source) -> None:
        with self._lock:
            self._parts.setdefault(part, ProgressRow(since_s=self._now())).source = source

    def step(self, step: int, metrics: JsonMapping) -> None:
        super().step(step, metrics)
        with self._lock:
            self._clock.advance(step, metrics.get(STEP_TIME))

    def warn(self, text: str) -> None:
        logger.warning("%s", text, extra={ON_SCREEN: True})  # the display shows it itself


class PlainProgress(TrackedProgress):
    """Prints one line per event. Activities of the parts are shown until the first step, and after `QUIET_S` without
    a line.

    Of steps in quick succession one is shown every `PLAIN_INTERVAL_S` seconds; the first and the last are always shown.
    """

    def __init__(self, total: int, *, start: int, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(total, start=start, console=console, now=now)
        self._shown_at_s: float | None = None
        self._held_back: str | None = None
        self._last_line_s = now()
        self._silence = Repeated("progress", self.report_if_quiet, QUIET_S)

    def status(self, part: str, text: str, *, busy: bool = True) -> None:
        with self._lock:
            is_news = part not in self._parts or self._parts[part].text != text
            super().status(part, text, busy=busy)
            if self._clock.done == 0 and is_news:
                self._line(f"{part}: {text}")

    def step(self, step: int, metrics: JsonMapping) -> None:
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
        self._silence.stop()
        with self._lock:
            self._show_held_back()

    def report_if_quiet(self) -> float:
        """Print the activities of the busy parts if the last line is `QUIET_S` old; return the seconds to wait."""
        with self._lock:
            left = self._last_line_s + QUIET_S - self._now()
            if left > 0:
                return left
            self._show_held_back()
            lines = []
            for name, part in self._parts.items():
                text, is_busy = part.doing()
                if is_busy:
                    since = "" if text != part.text else f" (for {format_seconds(self._now() - part.since_s)})"
                    lines.append(f"{name}: {text}{since}")
            self._line("; ".join(lines) or "running")
            return QUIET_S

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


class RichProgress(TrackedProgress):
    """Redraws itself a few times a second until `close`; then the last state stays on the screen."""

    def __init__(
        self, total: int, *, start: int, title: str, console: Console, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(total, start=start, console=console, now=now)
        self._title = title
        self._spinners: dict[str, Spinner] = {}
        self._steps: deque[tuple[int, list[str]]] = deque(maxlen=_SHOWN_STEPS)
        self._scores: dict[int, str] = {}
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=6, redirect_stderr=False)
        self._live.start()

    def step(self, step: int, metrics: JsonMapping) -> None:
        with self._lock:
            super().step(step, metrics)
            self._steps.append((step, figures_of(metrics)))

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        super().evaluation(step, scores)
        with self._lock:
            self._scores[step] = format_scores(scores)
        self.console.print(Text(f"eval {format_when(step)}: {self._scores[step]}", style="cyan"))

    def message(self, text: str) -> None:
        super().message(text)
        self.console.print(Text(text))

    def warn(self, text: str) -> None:
        super().warn(text)
        self.console.print(Text.assemble(("warning: ", "bold yellow"), text))

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        """Return the display in its present state: position, activities, last evaluation, last steps."""
        with self._lock:
            clock = self._clock
            position = Table.grid(padding=(0, 1), expand=True)
            position.add_column(no_wrap=True)
            position.add_column(ratio=1)
            position.add_column(no_wrap=True, justify="right")
            bar = ProgressBar(total=max(1, clock.total), completed=clock.position)
            times = f"{format_seconds(clock.elapsed_s)} elapsed, {format_seconds(clock.eta_s)} left"
            position.add_row(Text(f"step {clock.position}/{clock.total}", style="bold"), bar, Text(times, style="dim"))
            activities = Table.grid(padding=(0, 1))
            for name, part in self._parts.items():
                text, busy = part.doing()
                mark: RenderableType = Text("·", style="dim")
                if busy:
                    mark = self._spinners.setdefault(name, Spinner("dots", style="green"))
                doing = Text(text, style="" if busy else "dim")
                if busy and text == part.text:
                    doing.append(f"  {format_seconds(self._now() - part.since_s)}", style="dim")
                activities.add_row(mark, Text(name, style="bold" if busy else "dim"), doing)
            pieces: list[RenderableType] = [position, activities]
            if self._scores:
                step, scores = next(reversed(self._scores.items()))
                pieces.append(Text(f"eval {format_when(step)}: {scores}", style="cyan"))
            if self._steps:
                pieces.append(_StepTable(list(self._steps)))
        return Panel(Group(*pieces), title=f"[bold]{self._title}", title_align="left", border_style="dim")


class _StepTable:
    """The table of the last steps, with as many columns as fit."""

    def __init__(self, steps: list[tuple[int, list[str]]]) -> None:
        self._steps = steps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
        rows = [figures for _, figures in self._steps]
        newest = self._steps[-1][0]
        room = options.max_width - max(len("step"), len(str(newest + 1))) - _GAP
        widths = {i: _GAP + max(len(COLUMNS[i].title), *(len(row[i]) for row in rows)) for i in known(rows)}
        shown = columns_that_fit(widths, room)
        for title in ("step", *(COLUMNS[i].title for i in shown)):
            table.add_column(title, justify="right", no_wrap=True)
        for step, figures in self._steps:
            table.add_row(str(step + 1), *(figures[i] for i in shown), style="bold" if step == newest else "")
        yield table


class StepClock:
    """Elapsed time, and an estimate of the time left from the mean of the steps so far, without start-up."""

    def __init__(self, total: int, start: int, now: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.done = 0
        self.position = start
        """Rollouts that are done, including those before a resume."""
        self._now = now
        self._started = now()
        self._steps_began = self._started

    @property
    def elapsed_s(self) -> float:
        return self._now() - self._started

    def advance(self, step: int, seconds: float | None) -> None:
        """Count a step; `seconds` is its duration, if that is known."""
        if self.done == 0 and seconds is not None:
            self._steps_began = max(self._started, self._now() - seconds)
        self.done += 1
        self.position = step + 1

    @property
    def eta_s(self) -> float | None:
        if self.done == 0:
            return None
        return (self._now() - self._steps_began) / self.done * (self.total - self.position)


def make_progress(config: Config, total: int, *, start: int = 0, title: str = "slime") -> Progress:
    """Make the display that `--progress` chooses; rollouts are numbered `start` .. `total - 1`."""
    console = Console(highlight=False)
    kind = config.progress
    if kind == "auto":
        kind = "rich" if console.is_terminal else "plain"
    if kind == "none":
        return Progress(console, total)
    if kind == "rich":
        return RichProgress(total, start=start, title=title, console=console)
    return PlainProgress(total, start=start, console=console)


@contextmanager
def notify_if_slow(what: str, *, silent: bool = False, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Print `what` after a few seconds, and then every `QUIET_S`, until the body is done; nothing with `silent`."""
    began = time.monotonic()
    show = say or (lambda text: print(text, flush=True))

    def notify() -> float:
        show(f"[{format_seconds(time.monotonic() - began)}] {what}")
        return QUIET_S

    notices = None if silent else Repeated("patience", notify, FIRST_S)
    try:
        yield
    finally:
        if notices is not None:
            notices.stop()
