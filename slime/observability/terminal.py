"""The live display on a terminal: the position of the run, the activity of each part, the metrics of the last steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

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
    columns_that_fit,
    figures_of,
    format_scores,
    format_seconds,
    format_when,
    known,
)
from slime.observability.progress import PlainProgress, Progress, TrackedProgress
from slime.storage.json_types import JsonMapping

_SHOWN_STEPS = 8
_GAP = 2


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
