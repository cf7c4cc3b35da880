"""Formats the metrics of a step for the display: the choice of metrics, their format, and the columns that fit.

Pure functions. A column without values is left out; in a narrow terminal the least important columns are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from slime.storage.json_types import JsonMapping

STEP_TIME = "perf/step_time"
UNKNOWN = "-"


class MetricColumn(NamedTuple):
    """One column: title, metric names (the first one present is shown), format, and rank (9 is dropped first)."""

    title: str
    names: tuple[str, ...]
    layout: Callable[[float], str]
    rank: int
    quiet_zero: bool = False
    """True if a line for a step leaves out the value zero."""


COLUMNS = (
    MetricColumn("reward", ("rollout/raw_reward",), lambda value: f"{value:.3f}", 0),
    MetricColumn("loss", ("train/loss",), lambda value: f"{value:.4f}", 3),
    MetricColumn("grad", ("train/grad_norm",), lambda value: f"{value:.3g}", 4),
    MetricColumn(
        "kl", ("train/kl_loss", "rollout/kl", "train/ppo_kl"), lambda value: f"{value:.2g}", 6, quiet_zero=True
    ),
    MetricColumn("entropy", ("train/entropy_loss", "rollout/entropy"), lambda value: f"{value:.2f}", 5),
    MetricColumn("length", ("rollout/response_len/mean",), lambda value: f"{value:.1f}", 2),
    MetricColumn("cut", ("rollout/truncated_ratio",), lambda value: f"{value:.0%}", 7, quiet_zero=True),
    MetricColumn("0-std", ("rollout/zero_std/count",), lambda value: f"{value:.0f}", 8, quiet_zero=True),
    MetricColumn("tok/s", ("perf/tokens_per_gpu_per_sec",), lambda value: f"{value:,.0f}", 9),
    MetricColumn("s/step", (STEP_TIME,), lambda value: f"{value:.2f}", 1),
)


def figures_of(metrics: JsonMapping) -> list[str]:
    """Format the value of every column; "-" where the metrics have none."""
    return [UNKNOWN if (value := _value(column, metrics)) is None else column.layout(value) for column in COLUMNS]


def columns_that_fit(widths: Mapping[int, int], room: int) -> list[int]:
    """Choose the columns that fit into `room`, the most important ones first; `widths` are by column number."""
    kept: list[int] = []
    for index in sorted(widths, key=lambda index: COLUMNS[index].rank):
        if widths[index] <= room:
            room -= widths[index]
            kept.append(index)
    return sorted(kept)


def step_line(step: int, total: int, metrics: JsonMapping, *, width: int | None = None, tail: str = "") -> str:
    """Format a step as one line of at most `width` characters; without `width` all known columns are shown."""
    head = f"step {step + 1}/{total}"
    figures = figures_of(metrics)
    parts = {
        i: f"  {column.title} {figures[i]}"
        for i, column in enumerate(COLUMNS)
        if figures[i] != UNKNOWN and not (column.quiet_zero and _value(column, metrics) == 0)
    }
    room = None if width is None else width - len(head) - len(tail)
    shown = sorted(parts) if room is None else columns_that_fit({i: len(text) for i, text in parts.items()}, room)
    return head + "".join(parts[i] for i in shown) + tail


def known(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the numbers of the columns that have a value in any row."""
    return [i for i in range(len(COLUMNS)) if any(row[i] != UNKNOWN for row in rows)]


def _value(column: MetricColumn, metrics: JsonMapping) -> float | None:
    return next((metrics[name] for name in column.names if metrics.get(name) is not None), None)


def format_scores(scores: Mapping[str, float]) -> str:
    """Format the score of each evaluation dataset."""
    return "  ".join(f"{name} {score:.3f}" for name, score in scores.items())


def format_when(step: int) -> str:
    """Name the time of an evaluation: after a step, or before training."""
    return f"after step {step}" if step > 0 else "before training"


def format_seconds(seconds: float | None) -> str:
    """Format a duration as m:ss or h:mm:ss; "-" if it is unknown."""
    if seconds is None:
        return UNKNOWN
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
