"""The figures of a step as people read them: which metrics, in what format, and which of them fit into a width.

Pure functions. A column of which nothing is known is left out; in a narrow terminal the least important go first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

STEP_TIME = "perf/step_time"
UNKNOWN = "-"


class Column(NamedTuple):
    """One figure of a step: its title, its metric (the first that is there), its format, and who goes first: 9."""

    title: str
    names: tuple[str, ...]
    layout: Callable[[float], str]
    rank: int
    quiet_zero: bool = False
    """Where space is scarce a zero is not worth a word."""


def _percent(value: float) -> str:
    return f"{value:.0%}"


COLUMNS = (
    Column("reward", ("rollout/raw_reward",), lambda value: f"{value:.3f}", 0),
    Column("loss", ("train/loss",), lambda value: f"{value:.4f}", 3),
    Column("grad", ("train/grad_norm",), lambda value: f"{value:.3g}", 4),
    Column("kl", ("train/kl_loss", "rollout/kl", "train/ppo_kl"), lambda value: f"{value:.2g}", 6, quiet_zero=True),
    Column("entropy", ("train/entropy_loss", "rollout/entropy"), lambda value: f"{value:.2f}", 5),
    Column("length", ("rollout/response_len/mean",), lambda value: f"{value:.1f}", 2),
    Column("cut", ("rollout/truncated_ratio",), _percent, 7, quiet_zero=True),
    Column("0-std", ("rollout/zero_std/count",), lambda value: f"{value:.0f}", 8, quiet_zero=True),
    Column("tok/s", ("perf/tokens_per_gpu_per_sec",), lambda value: f"{value:,.0f}", 9),
    Column("s/step", (STEP_TIME,), lambda value: f"{value:.2f}", 1),
)


def figures_of(metrics: Mapping[str, Any]) -> list[str]:
    """The formatted value of every column; "-" where the metrics do not say."""
    return [UNKNOWN if (value := _value(column, metrics)) is None else column.layout(value) for column in COLUMNS]


def fitting(widths: Mapping[int, int], room: int) -> list[int]:
    """The columns (by number, with the width that each one takes) that fit together, the most important ones first."""
    kept: list[int] = []
    for index in sorted(widths, key=lambda index: COLUMNS[index].rank):
        if widths[index] <= room:
            room -= widths[index]
            kept.append(index)
    return sorted(kept)


def step_line(step: int, total: int, metrics: Mapping[str, Any], *, width: int | None = None, tail: str = "") -> str:
    """One step in one line that `width` holds; without it all that is known is said."""
    head = f"step {step + 1}/{total}"
    figures = figures_of(metrics)
    parts = {i: f"  {COLUMNS[i].title} {figures[i]}" for i in range(len(COLUMNS)) if _says(i, figures[i], metrics)}
    room = None if width is None else width - len(head) - len(tail)
    shown = sorted(parts) if room is None else fitting({i: len(text) for i, text in parts.items()}, room)
    return head + "".join(parts[i] for i in shown) + tail


def known(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns of which any row says something."""
    return [i for i in range(len(COLUMNS)) if any(row[i] != UNKNOWN for row in rows)]


def _value(column: Column, metrics: Mapping[str, Any]) -> float | None:
    return next((metrics[name] for name in column.names if metrics.get(name) is not None), None)


def _says(index: int, figure: str, metrics: Mapping[str, Any]) -> bool:
    column = COLUMNS[index]
    return figure != UNKNOWN and not (column.quiet_zero and _value(column, metrics) == 0)


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
