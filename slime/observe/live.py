"""The live display on a terminal: where the run is, what each part is doing, and the figures of the last steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slime.observe.progress import (
    COLUMNS,
    STEP_TIME,
    UNKNOWN,
    StepClock,
    figures_of,
    format_scores,
    format_seconds,
    format_when,
)

_SHOWN_STEPS = 8
_IDLE = {"idle", "done", "waiting", "ready"}


class RichProgress:
    """Redraws itself a few times a second until `close`; then the last picture stays on the screen."""

    def __init__(self, total: int, *, start: int, title: str, console: Console) -> None:
        self.console = console
        self._title = title
        self._clock = StepClock(total, start)
        self._parts: dict[str, tuple[str, float, Spinner]] = {}
        self._steps: deque[tuple[int, list[str]]] = deque(maxlen=_SHOWN_STEPS)
        self._scores: dict[int, str] = {}
        self._lock = threading.RLock()
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=6, redirect_stderr=False)
        self._live.start()

    def status(self, part: str, text: str) -> None:
        with self._lock:
            previous = self._parts.get(part)
            spinner = previous[2] if previous else Spinner("dots", style="green")
            since = previous[1] if previous and previous[0] == text else time.monotonic()
            self._parts[part] = (text, since, spinner)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        with self._lock:
            self._clock.advance(step, metrics.get(STEP_TIME))
            self._steps.append((step, [value for _, value in figures_of(metrics)]))

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        with self._lock:
            self._scores[step] = format_scores(scores)
        self.console.print(Text(f"eval {format_when(step)}: {self._scores[step]}", style="cyan"))

    def message(self, text: str) -> None:
        self.console.print(Text(text))

    def close(self) -> None:
        self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def render(self) -> RenderableType:
        """The picture as it is now."""
        with self._lock:
            pieces: list[RenderableType] = [self._position(), self._doing()]
            if self._scores:
                step, scores = next(reversed(self._scores.items()))
                pieces.append(Text(f"eval {format_when(step)}: {scores}", style="cyan"))
            if self._steps:
                pieces.append(self._figures())
        return Panel(Group(*pieces), title=f"[bold]{self._title}", title_align="left", border_style="dim")

    def _position(self) -> Table:
        clock = self._clock
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=max(1, clock.total), completed=clock.position)
        times = f"{format_seconds(clock.elapsed_s)} elapsed, {format_seconds(clock.eta_s)} left"
        line.add_row(Text(f"step {clock.position}/{clock.total}", style="bold"), bar, Text(times, style="dim"))
        return line

    def _doing(self) -> Table:
        lines = Table.grid(padding=(0, 1))
        for part, (text, since, spinner) in self._parts.items():
            resting = text in _IDLE
            mark: RenderableType = Text("·", style="dim") if resting else spinner
            doing = Text(text, style="dim" if resting else "")
            if not resting:
                doing.append(f"  {format_seconds(time.monotonic() - since)}", style="dim")
            lines.add_row(mark, Text(part, style="bold" if not resting else "dim"), doing)
        return lines

    def _figures(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        known = [i for i in range(len(COLUMNS)) if any(figures[i] != UNKNOWN for _, figures in self._steps)]
        for title in ("step", *(COLUMNS[i].title for i in known)):
            table.add_column(title, justify="right", no_wrap=True)
        newest = self._steps[-1][0]
        for step, figures in self._steps:
            table.add_row(str(step + 1), *(figures[i] for i in known), style="bold" if step == newest else "")
        return table
