"""What a person sees while a run goes on: a live table on a terminal, one line per event elsewhere.

The invariant: showing never decides anything. The driver reports the same events to every kind of display, and the one
that shows nothing is a display like the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime.config import Config

STEP_TIME = "perf/step_time"
UNKNOWN = "-"
PLAIN_INTERVAL_S = 2.0


class Column(NamedTuple):
    """One figure of a step: its title, its metric, and its format."""

    title: str
    name: str
    layout: Callable[[float], str]


COLUMNS = (
    Column("reward", "rollout/raw_reward", lambda value: f"{value:.3f}"),
    Column("loss", "train/loss", lambda value: f"{value:.4f}"),
    Column("grad norm", "train/grad_norm", lambda value: f"{value:.3g}"),
    Column("length", "rollout/response_len/mean", lambda value: f"{value:.1f}"),
    Column("tok/s", "perf/tokens_per_gpu_per_sec", lambda value: f"{value:,.0f}"),
    Column("s/step", STEP_TIME, lambda value: f"{value:.2f}"),
)


class Progress(Protocol):
    """The events of a run. `console` is where log messages may be printed without disturbing the display."""

    console: Console

    def status(self, part: str, text: str) -> None:
        """What a part (rollout, trainer, weights, ...) is doing now."""

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A rollout has been generated and trained on."""

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """The score of each evaluation dataset, with the weights after `step` steps (0: before training)."""

    def message(self, text: str) -> None:
        """Something worth a line of its own."""

    def close(self) -> None:
        """No more events. Safe to call again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


def make_progress(config: Config, total: int, *, start: int = 0, title: str = "slime") -> Progress:
    """The display for `--progress`; rollouts are numbered `start` .. `total - 1`."""
    from slime.observe.live import RichProgress

    console = Console(highlight=False)
    kind = config.progress
    if kind == "auto":
        kind = "rich" if console.is_terminal else "plain"
    if kind == "none":
        return NoProgress(console)
    if kind == "rich":
        return RichProgress(total, start=start, title=title, console=console)
    return PlainProgress(total, start=start, console=console)


class NoProgress:
    """Shows nothing."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def status(self, part: str, text: str) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class PlainProgress(NoProgress):
    """One line per event; what a part is doing is shown only until the first step, while there is nothing else.

    Of steps in quick succession one is shown every `PLAIN_INTERVAL_S` seconds, the first and the last always.
    """

    def __init__(self, total: int, *, start: int, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = StepClock(total, start, now)
        self._last_status: dict[str, str] = {}
        self._shown_at_s: float | None = None
        self._held_back: str | None = None

    def status(self, part: str, text: str) -> None:
        if self._clock.done == 0 and self._last_status.get(part) != text:
            self._line(f"{part}: {text}")
        self._last_status[part] = text

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._clock.advance(step, metrics.get(STEP_TIME))
        figures = "  ".join(f"{title} {value}" for title, value in figures_of(metrics) if value != UNKNOWN)
        self._held_back = f"step {step + 1}/{self._clock.total}  {figures}  eta {format_seconds(self._clock.eta_s)}"
        elapsed = self._clock.elapsed_s
        is_last = step + 1 == self._clock.total
        if is_last or self._shown_at_s is None or elapsed - self._shown_at_s >= PLAIN_INTERVAL_S:
            self._shown_at_s = elapsed
            self._show_held_back()

    def evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        self._show_held_back()
        self._line(f"eval {format_when(step)}: {format_scores(scores)}")

    def message(self, text: str) -> None:
        self._show_held_back()
        self._line(text)

    def close(self) -> None:
        self._show_held_back()

    def _show_held_back(self) -> None:
        line, self._held_back = self._held_back, None
        if line is not None:
            self._line(line)

    def _line(self, text: str) -> None:
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


def figures_of(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, formatted value) of every column; "-" where the metrics do not say."""
    figures = []
    for column in COLUMNS:
        value = metrics.get(column.name)
        figures.append((column.title, UNKNOWN if value is None else column.layout(value)))
    return figures


def format_scores(scores: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {score:.3f}" for name, score in scores.items())


def format_when(step: int) -> str:
    return f"after step {step}" if step > 0 else "before training"


def format_seconds(seconds: float | None) -> str:
    """As m:ss or h:mm:ss; "-" for unknown."""
    if seconds is None:
        return UNKNOWN
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def print_summary(rows: Sequence[tuple[str, str]], *, title: str = "Summary", console: Console | None = None) -> None:
    """A two-column table at the end of a run."""
    console = console or Console(highlight=False)
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, min_width=40)
    table.add_column(style="cyan" if console.is_terminal else None, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)
