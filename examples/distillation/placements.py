"""Two runs that differ in where the teacher is: whether it said the same, and the picture of both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slime.observability.metrics import read_metrics
from slime.observability.plots import EVAL_SCORES, metric_points

REVERSE_KL = "rollout/opd_reverse_kl"
TRAIN_DUMP = "train_{rollout_id}.jsonl"
COLORS = ("#2563eb", "#ea580c")


class Agreement(NamedTuple):
    """The first step of two runs, in which their students are still the same."""

    alike: float
    """Share of the samples that have the same tokens in both."""
    apart: float
    """The most that the teacher's log-probs of a token differ, in samples that are alike."""
    kl_apart: float
    """The most that the reverse KL of a token differs, in the same samples."""

    def holds(self, *, alike: float, apart: float) -> bool:
        return self.alike >= alike and self.apart <= apart and self.kl_apart <= apart


def agreement(one: Path, other: Path) -> Agreement:
    """Of two run folders: what the first step computed for each token, in both."""
    first, second = (_computed(folder / TRAIN_DUMP.format(rollout_id=0)) for folder in (one, other))
    pairs = [(first[index], second[index]) for index in first.keys() & second.keys()]
    alike = [(mine, theirs) for mine, theirs in pairs if mine["tokens"] == theirs["tokens"]]
    if not alike:
        return Agreement(0.0, float("inf"), float("inf"))
    apart, kl_apart = (
        max(abs(a - b) for mine, theirs in alike for a, b in zip(mine[name], theirs[name], strict=True))
        for name in ("teacher_log_probs", "opd_reverse_kl")
    )
    return Agreement(len(alike) / max(len(first), len(second)), apart, kl_apart)


def _computed(dump: Path) -> dict[int, dict[str, Any]]:
    _, *rows = map(json.loads, dump.read_text().splitlines())
    return {row["sample_indices"]: row for row in rows}


def reverse_kls(run: Path) -> list[float]:
    """The mean over the sampled tokens, step by step."""
    return [record[REVERSE_KL] for record in read_metrics(run / "metrics.jsonl") if REVERSE_KL in record]


def scores(run: Path) -> list[tuple[int, float]]:
    """(step, held-out accuracy)."""
    return metric_points(read_metrics(run / "metrics.jsonl"), EVAL_SCORES, "step")["held-out"]


def draw(runs: Mapping[str, Path], teacher: float, out: Path) -> Path:
    """Accuracy with the teacher's as a line, and the distance to the teacher."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    right, distance = figure.subplots(1, 2)
    for (name, run), color, style in zip(runs.items(), COLORS, ("-", "--"), strict=False):
        _line(right, scores(run), color=color, linestyle=style, marker="o", label=f"teacher in the {name}")
        _line(distance, enumerate(reverse_kls(run)), color=color, linestyle=style, label=f"teacher in the {name}")
    right.axhline(teacher, color="#64748b", linestyle=":", label="the teacher itself")
    right.set_ylim(0, 1.02)
    for axes, what in ((right, "held-out accuracy"), (distance, "reverse KL, nats a token")):
        axes.set_title(what, loc="left", fontsize=10)
        axes.set_xlabel("step of distillation")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=80)
    return out


def _line(axes: Any, points: Iterable[tuple[int, float]], **style: Any) -> None:
    axes.plot(*zip(*points, strict=True), **style)
