"""The same training in several modes, one after the other: a table and a plot of their `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from slime.observability.metrics import read_metrics
from slime.observability.plots import (
    EVAL_COLORS,
    EVAL_SCORES,
    TRAIN_COLOR,
    metric_points,
    new_axes,
    plot_smoothed,
    save_axes,
)

WARM_UP = 3
"""Steps that no speed is taken from: engines and trainers run in."""


class Figures(NamedTuple):
    """One run. Speed and seconds are those of the steps after `WARM_UP`; staleness counts versions of the weights."""

    samples_per_s: float
    waited_s: float
    """How long the trainers waited for rollouts in a step."""
    straggler_s: float
    """Of that, for the last tenth of a rollout."""
    staleness: float
    oldest: float
    mixed: float
    """Share of the samples under which the weights changed."""
    longest: float
    """Tokens of the longest answer that was trained on."""
    before: float
    after: float


def figures_of(run: Path, samples_a_step: int) -> Figures:
    """What the run in this folder was like. A run that was killed and went on has all of its steps on record."""
    records = read_metrics(run / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "rollout" and "perf/step_time" in record]
    timed = steps[WARM_UP:] or steps
    scores = [score for _, score in metric_points(records, EVAL_SCORES, "step")["held-out"]]
    return Figures(
        samples_per_s=samples_a_step / _mean("perf/step_time", timed),
        waited_s=_mean("perf/rollout_wait_time", timed),
        straggler_s=_mean("perf/straggler_wait_time", timed),
        staleness=_mean("rollout/staleness/mean", steps),
        oldest=max(step.get("rollout/staleness/max", 0.0) for step in steps),
        mixed=_mean("rollout/mixed_version_frac", steps),
        longest=max(step["rollout/response_len/max"] for step in steps),
        before=scores[0],
        after=scores[-1],
    )


def _mean(name: str, steps: Sequence[Mapping[str, Any]]) -> float:
    return fmean(step.get(name, 0.0) for step in steps)


def table(runs: Mapping[str, Figures]) -> str:
    """One line for each mode; speeds against the synchronous one's where it is there, else against the first's."""
    base = runs.get("sync", next(iter(runs.values()))).samples_per_s
    titles = ("mode", "samples/s", "ratio", "waited", "stragglers", "staleness", "oldest", "mixed", "longest", "right")
    lines = [titles] + [
        (
            mode,
            f"{one.samples_per_s:.1f}",
            f"{one.samples_per_s / base:.2f}x",
            f"{one.waited_s:.2f} s",
            f"{one.straggler_s:.2f} s",
            f"{one.staleness:.2f}",
            f"{one.oldest:.0f}",
            f"{one.mixed:.0%}",
            f"{one.longest:.0f}",
            f"{one.before:.1%} -> {one.after:.1%}",
        )
        for mode, one in runs.items()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(f"{line[0]:<{widths[0]}}" + "".join(_right(line[1:], widths[1:])) for line in lines)


def _right(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]


def reward_by_seconds(records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return (seconds of all steps up to it, mean reward) of each rollout.

    Evaluations and the time between a crash and the next start are left out, so that runs can be compared.
    """
    spent, points = 0.0, []
    for record in sorted((one for one in records if "perf/step_time" in one), key=lambda one: one["rollout_id"]):
        spent += record["perf/step_time"]
        if record.get("rollout/raw_reward") is not None:
            points.append((spent, record["rollout/raw_reward"]))
    return points


def draw_comparison(runs: Mapping[str, Path], out: Path, title: str) -> Path:
    """Plot the rewards of several runs over the seconds of their steps; `runs` are metrics files by name."""
    axes = new_axes(7, 3.8)
    for (name, file), color in zip(runs.items(), cycle((TRAIN_COLOR, *EVAL_COLORS))):
        points = reward_by_seconds(read_metrics(file))
        if points:
            axes.plot(*zip(*points, strict=True), color=color, alpha=0.2, linewidth=1)
            last = plot_smoothed(axes, points, color=color, linewidth=2, label=name)
            axes.plot(*last, color=color, marker="o", markersize=5)
    axes.grid(axis="y", color="#e2e8f0")
    axes.legend(frameon=False, loc="best", fontsize=9)
    return save_axes(axes, out, title, ("seconds of training", "mean reward"), dpi=80)
