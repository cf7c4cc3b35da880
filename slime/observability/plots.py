"""Plots of a run, drawn from its metrics file: the reward, the loss of a run without rewards, and the memory.

A plot is replaced as a whole, so that a reader never sees an incomplete one while the run continues.

Invariant: plotting takes no time of the driver. A separate process of the lowest priority draws at most once every
`interval_s`; the driver does not wait for it before the end of the run, and none outlives the run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cluster.child_env import without_secrets
from slime.observability.metric_format import STEP_TIME
from slime.observability.metrics import read_metrics
from slime.storage.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REWARD = "rollout/raw_reward"
LOSS = "train/loss"
_TASK_REWARD = re.compile(r"rollout/(.+)/raw_reward")
_EVAL_DETAIL = re.compile(r"eval/(.*/.*|.*-truncated_ratio|.*-pass@\d+|step)")
_INK = "#334155"
_TRAIN = "#2563eb"
_PHASE_COLORS = ("#f1f5f9", "#dbeafe", "#fee2e2", "#dcfce7", "#fef9c3", "#f3e8ff", "#cffafe")
_MEMORY_S = 600.0  # the last seconds of a long run that the memory plot shows
_EVALS = ("#ea580c", "#059669", "#9333ea", "#be123c")
_PACKAGE_ROOT = str(Path(__file__).parents[2])
INTERVAL_S = 60.0
"""Seconds between two drawings of a run."""
FIRST_S = 20.0
"""Seconds from the start of a run to its first drawing."""

Points = list[tuple[int, float]]

logger = logging.getLogger(__name__)


def reward_points(records: Sequence[JsonMapping]) -> Points:
    """Return (rollout, mean reward) of the training rollouts."""
    return sorted((record["rollout_id"], record[REWARD]) for record in records if record.get(REWARD) is not None)


def eval_points(records: Sequence[JsonMapping]) -> dict[str, Points]:
    """Return (step, score) per evaluation dataset."""
    points: dict[str, Points] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if name.startswith("eval/") and value is not None and not _EVAL_DETAIL.fullmatch(name):
                points[name.removeprefix("eval/")].append((record["step"], value))
    return {name: sorted(values) for name, values in points.items()}


def task_points(records: Sequence[JsonMapping]) -> dict[str, Points]:
    """Return (rollout, mean reward) per dataset of `--prompt-config`."""
    points: dict[str, Points] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if value is not None and (found := _TASK_REWARD.fullmatch(name)):
                points[found[1]].append((record["rollout_id"], value))
    return {name: sorted(values) for name, values in points.items()}


def smooth(values: Sequence[float], *, half_life: float) -> list[float]:
    """Return the exponential moving average, without bias towards the start: the weights always sum to one."""
    decay = 0.5 ** (1.0 / half_life)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total = decay * total + value
        weight = decay * weight + 1.0
        smoothed.append(total / weight)
    return smoothed


def loss_points(records: Sequence[JsonMapping]) -> Points:
    """Return (optimizer step, loss)."""
    return sorted((record["step"], record[LOSS]) for record in records if record.get(LOSS) is not None)


def draw_curves(
    metrics_jsonl: str | os.PathLike[str], folder: str | os.PathLike[str], title: str = "Reward"
) -> dict[str, Path]:
    """Draw the plots that the records allow; return their files by name ("reward curve", "loss curve", "memory")."""
    records = read_metrics(metrics_jsonl) if Path(metrics_jsonl).exists() else []
    train, evals, losses = reward_points(records), eval_points(records), loss_points(records)
    drawn: dict[str, Path] = {}
    if train or evals:
        own = ("training reward", train)
        scales = ("step", "mean reward")
        drawn["reward curve"] = _draw(Path(folder, "reward.png"), title, own, scales, evals, task_points(records))
    if losses and not train:
        own = ("training loss", losses)
        drawn["loss curve"] = _draw(Path(folder, "loss.png"), title, own, ("optimizer step", "loss"), {}, {})
    if (memory := memory_points(Path(folder, "memory.jsonl"))) is not None:
        drawn["memory"] = draw_memory(memory, Path(folder, "memory.png"), title)
    return drawn


def memory_points(file: Path, last_s: float = _MEMORY_S) -> list[JsonObject] | None:
    """Read the rows of the run's last `last_s` seconds; None if there are fewer than two."""
    if not file.is_file():
        return None
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    rows = [row for row in rows if row["t"] >= rows[-1]["t"] - last_s]
    return rows if len(rows) > 1 else None


def draw_memory(rows: Sequence[JsonMapping], out: Path, title: str) -> Path:
    """Plot the used memory of devices and host over time, with the phases as background colours."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.add_subplot()
    phases = dict.fromkeys(row["phase"] for row in rows)
    grounds = {phase: _PHASE_COLORS[index % len(_PHASE_COLORS)] for index, phase in enumerate(phases)}
    times = [row["t"] for row in rows]
    for row, following in pairwise(rows):
        axes.axvspan(row["t"], following["t"], color=grounds[row["phase"]], linewidth=0)
    for name, color in (("device", _TRAIN), ("host", _EVALS[0])):
        if name in rows[0]:
            axes.plot(
                times, [row[name] for row in rows], color=color, linewidth=1.6, drawstyle="steps-post", label=name
            )
    lines = axes.get_legend_handles_labels()[0]
    grounds_shown = [Patch(color=color, label=phase) for phase, color in grounds.items()]
    axes.legend(handles=[*lines, *grounds_shown], frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    axes.set_title(f"{title}: memory used on the machine", loc="left", color=_INK, fontweight="bold")
    axes.set_xlabel("seconds", color=_INK)
    axes.set_ylabel("GiB", color=_INK)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    return _save_figure(figure, out)


def _draw(
    out: Path,
    title: str,
    own: tuple[str, Points],
    scales: tuple[str, str],
    evals: Mapping[str, Points],
    tasks: Mapping[str, Points],
) -> Path:
    """Plot a curve, raw and smoothed, the scores of the evaluations, and dashed curves of the training datasets.

    An evaluation and a training dataset of the same name have the same colour.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    name, values = own
    if values:
        steps, heights = zip(*values, strict=True)
        axes.plot(steps, heights, color=_TRAIN, alpha=0.25, linewidth=1, label=name)
        curve = smooth(heights, half_life=max(1.0, math.sqrt(len(heights)) / 2))
        axes.plot(steps, curve, color=_TRAIN, linewidth=2, label=f"{name}, smoothed")
    colors = dict(zip(dict.fromkeys((*evals, *tasks)), cycle(_EVALS)))
    for task, points in tasks.items():
        steps, heights = zip(*points, strict=True)
        curve = smooth(heights, half_life=max(1.0, math.sqrt(len(heights)) / 2))
        axes.plot(steps, curve, color=colors[task], linewidth=1.2, linestyle="--", label=f"training: {task}, smoothed")
    for dataset, points in evals.items():
        steps, scores = zip(*points, strict=True)
        color = colors[dataset]
        axes.plot(steps, scores, color=color, marker="o", markersize=5, linewidth=1.2, label=f"eval: {dataset}")
        axes.annotate(
            f"{scores[-1]:.3g}", (steps[-1], scores[-1]), textcoords="offset points", xytext=(6, 4), color=color
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label_axes(axes, title, scales)
    return _save_figure(figure, out)


def reward_by_seconds(records: Sequence[JsonMapping]) -> list[tuple[float, float]]:
    """Return (seconds of all steps up to it, mean reward) of each rollout.

    Evaluations and the time between a crash and the next start are left out, so that runs can be compared.
    """
    spent, points = 0.0, []
    for record in sorted((one for one in records if STEP_TIME in one), key=lambda one: one["rollout_id"]):
        spent += record[STEP_TIME]
        if record.get(REWARD) is not None:
            points.append((spent, record[REWARD]))
    return points


def draw_comparison(runs: Mapping[str, str | os.PathLike[str]], out: Path, title: str) -> Path:
    """Plot the rewards of several runs over the seconds of their steps; `runs` are metrics files by name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for (name, file), color in zip(runs.items(), cycle((_TRAIN, *_EVALS))):
        points = reward_by_seconds(read_metrics(file))
        if not points:
            continue
        seconds, rewards = zip(*points, strict=True)
        axes.plot(seconds, rewards, color=color, alpha=0.2, linewidth=1)
        curve = smooth(rewards, half_life=max(1.0, math.sqrt(len(rewards)) / 2))
        axes.plot(seconds, curve, color=color, linewidth=2, label=name)
        axes.plot(seconds[-1:], curve[-1:], color=color, marker="o", markersize=5)
    _label_axes(axes, title, ("seconds of training", "mean reward"))
    return _save_figure(figure, out, dpi=80)


def _label_axes(axes: Axes, title: str, scales: tuple[str, str]) -> None:
    axes.set_title(title, loc="left", color=_INK, fontweight="bold")
    axes.set_xlabel(scales[0], color=_INK)
    axes.set_ylabel(scales[1], color=_INK)
    axes.grid(axis="y", color="#e2e8f0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best", fontsize=9)


def _save_figure(figure: Figure, out: Path, dpi: int = 150) -> Path:
    """Write the figure to a temporary file and move it to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    figure.savefig(unfinished, dpi=dpi, format="png")
    unfinished.replace(out)
    return out


class RunPlots:
    """Draws `reward.png` (or `loss.png`) and `memory.png` next to `metrics.jsonl` during a run."""

    def __init__(
        self,
        metrics: Path,
        *,
        first_s: float = FIRST_S,
        interval_s: float = INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self._now = now
        self._due = now() + first_s
        self._drawing: subprocess.Popen[bytes] | None = None
        self._finished: dict[str, Path] | None = None

    def redraw(self) -> bool:
        """Start a process that redraws the plots if they are old; return whether it was started."""
        if self._now() < self._due or (self._drawing is not None and self._drawing.poll() is None):
            return False
        self._due = self._now() + self._interval_s
        paths = filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")])
        self._drawing = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, self._metrics, self._metrics.parent, self._title],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**without_secrets(os.environ), "PYTHONPATH": os.pathsep.join(paths)},
        )
        return True

    def stop(self) -> None:
        """Kill a drawing process that is running. Safe to call again."""
        if self._drawing is not None:
            self._drawing.kill()
            self._drawing.wait()
            self._drawing = None

    def finish(self) -> dict[str, Path]:
        """Draw the final plots once and return their files by name; empty for a run without records."""
        self.stop()
        if self._finished is None:
            self._finished = {}
            try:
                self._finished = draw_curves(self._metrics, self._metrics.parent, self._title)
            except OSError as error:
                logger.warning("the curves of this run could not be drawn: %s", error)
        return self._finished

    @property
    def _title(self) -> str:
        return self._metrics.parent.name


if __name__ == "__main__":
    os.nice(19)  # all other work of the machine has priority
    draw_curves(*sys.argv[1:4])
