"""The live display on a terminal: where the run is, what each part is doing, and the figures of the last steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slime.config import Config
from slime.observability.metric_format import (
    COLUMNS,
    figures_of,
    fitting,
    format_scores,
    format_seconds,
    format_when,
    known,
)
from slime.observability.progress import NoProgress, PlainProgress, Progress, Shown

_SHOWN_STEPS = 8
_GAP = 2


class RichProgress(Shown):
    """Redraws itself a few times a second until `close`; then the last picture stays on the screen."""

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

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
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
        """The picture as it is now."""
        with self._lock:
            pieces: list[RenderableType] = [self._position(), self._doing()]
            if self._scores:
                step, scores = next(reversed(self._scores.items()))
                pieces.append(Text(f"eval {format_when(step)}: {scores}", style="cyan"))
            if self._steps:
                pieces.append(_Figures(list(self._steps)))
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
        for name, part in self._parts.items():
            text, busy = part.doing()
            mark: RenderableType = self._spinner(name) if busy else Text("·", style="dim")
            doing = Text(text, style="" if busy else "dim")
            if busy and text == part.text:
                doing.append(f"  {format_seconds(self._now() - part.since_s)}", style="dim")
            lines.add_row(mark, Text(name, style="bold" if busy else "dim"), doing)
        return lines

    def _spinner(self, name: str) -> Spinner:
        return self._spinners.setdefault(name, Spinner("dots", style="green"))


class _Figures:
    """The table of the last steps, with as many columns as fit."""

    def __init__(self, steps: list[tuple[int, list[str]]]) -> None:
        self._steps = steps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
        rows = [figures for _, figures in self._steps]
        newest = self._steps[-1][0]
        room = options.max_width - max(len("step"), len(str(newest + 1))) - _GAP
        widths = {i: _GAP + max(len(COLUMNS[i].title), *(len(row[i]) for row in rows)) for i in known(rows)}
        shown = fitting(widths, room)
        for title in ("step", *(COLUMNS[i].title for i in shown)):
            table.add_column(title, justify="right", no_wrap=True)
        for step, figures in self._steps:
            table.add_row(str(step + 1), *(figures[i] for i in shown), style="bold" if step == newest else "")
        yield table


# Which display a run has.


def make_progress(config: Config, total: int, *, start: int = 0, title: str = "slime") -> Progress:
    """The display for `--progress`; rollouts are numbered `start` .. `total - 1`."""
    console = Console(highlight=False)
    kind = config.progress
    if kind == "auto":
        kind = "rich" if console.is_terminal else "plain"
    if kind == "none":
        return NoProgress(console, total)
    if kind == "rich":
        return RichProgress(total, start=start, title=title, console=console)
    return PlainProgress(total, start=start, console=console)
