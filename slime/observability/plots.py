"""Plots of a run, drawn from its metrics file: the reward, the loss of a run without rewards, and the memory.

A plot is replaced as a whole, so that a reader never sees an incomplete one while the run continues.

Invariant: plotting takes no time of the driver. A separate process of the lowest priority draws at most once every
`interval_s`; the driver does not wait for it before the end of the run, and none outlives the driver.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.cluster.child_env import without_secrets
from slime.observability.metrics import read_metrics
from slime.storage.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARDS = re.compile(r"rollout/(raw_reward)")
LOSSES = re.compile(r"train/(loss)")
TASK_REWARDS = re.compile(r"rollout/(.+)/raw_reward")
EVAL_SCORES = re.compile(r"eval/((?!step$|.*-truncated_ratio$|.*-pass@\d+$)[^/]+)")
"""Metrics by name; the group is the name of the curve."""
_INK = "#334155"
TRAIN_COLOR = "#2563eb"
_PHASE_COLORS = ("#f1f5f9", "#dbeafe", "#fee2e2", "#dcfce7", "#fef9c3", "#f3e8ff", "#cffafe")
_MEMORY_S = 600.0  # the last seconds of a long run that the memory plot shows
EVAL_COLORS = ("#ea580c", "#059669", "#9333ea", "#be123c")
_PR_SET_PDEATHSIG = 1
_PACKAGE_ROOT = str(Path(__file__).parents[2])
INTERVAL_S = 60.0
"""Seconds between two drawings of a run."""
FIRST_S = 20.0
"""Seconds from the start of a run to its first drawing."""

Points = list[tuple[int, float]]

logger = logging.getLogger(__name__)


def metric_points(records: Sequence[JsonMapping], metric: re.Pattern[str], step: str) -> dict[str, Points]:
    """Return (step, value) of the metrics with such names, by the pattern's group; `step` is the field of the step."""
    points: dict[str, Points] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if value is not None and (found := metric.fullmatch(name)):
                points[found[1]].append((record[step], value))
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


def draw_curves(
    metrics_jsonl: str | os.PathLike[str], folder: str | os.PathLike[str], title: str = "Reward"
) -> dict[str, Path]:
    """Draw the plots that the records allow; return their files by name ("reward curve", "loss curve", "memory")."""
    records = read_metrics(metrics_jsonl) if Path(metrics_jsonl).exists() else []
    train, losses = metric_points(records, REWARDS, "rollout_id"), metric_points(records, LOSSES, "step")
    evals, tasks = metric_points(records, EVAL_SCORES, "step"), metric_points(records, TASK_REWARDS, "rollout_id")
    drawn: dict[str, Path] = {}
    if train or evals:
        drawn["reward curve"] = _draw_training(
            Path(folder, "reward.png"), title, ("step", "mean reward"), train.get("raw_reward", []), evals, tasks
        )
    if losses and not train:
        drawn["loss curve"] = _draw_training(
            Path(folder, "loss.png"), title, ("optimizer step", "loss"), losses["loss"], {}, {}
        )
    if (memory := memory_points(Path(folder, "memory.jsonl"))) is not None:
        drawn["memory"] = _draw_memory(memory, Path(folder, "memory.png"), title)
    return drawn


def memory_points(file: Path, last_s: float = _MEMORY_S) -> list[JsonObject] | None:
    """Read the rows of the run's last `last_s` seconds; None if there are fewer than two."""
    if not file.is_file():
        return None
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    rows = [row for row in rows if row["t"] >= rows[-1]["t"] - last_s]
    return rows if len(rows) > 1 else None


def _draw_memory(rows: Sequence[JsonMapping], out: Path, title: str) -> Path:
    """Plot the used memory of devices and host over time, with the phases as background colours."""
    from matplotlib.patches import Patch

    axes = new_axes(10, 4.5)
    phases = dict.fromkeys(row["phase"] for row in rows)
    grounds = {phase: _PHASE_COLORS[index % len(_PHASE_COLORS)] for index, phase in enumerate(phases)}
    times = [row["t"] for row in rows]
    for row, following in pairwise(rows):
        axes.axvspan(row["t"], following["t"], color=grounds[row["phase"]], linewidth=0)
    for name, color in (("device", TRAIN_COLOR), ("host", EVAL_COLORS[0])):
        if name in rows[0]:
            axes.plot(
                times, [row[name] for row in rows], color=color, linewidth=1.6, drawstyle="steps-post", label=name
            )
    lines = axes.get_legend_handles_labels()[0]
    grounds_shown = [Patch(color=color, label=phase) for phase, color in grounds.items()]
    axes.legend(handles=[*lines, *grounds_shown], frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    axes.set_ylim(bottom=0)
    return save_axes(axes, out, f"{title}: memory used on the machine", ("seconds", "GiB"))


def _draw_training(
    out: Path,
    title: str,
    scales: tuple[str, str],
    train: Points,
    evals: Mapping[str, Points],
    tasks: Mapping[str, Points],
) -> Path:
    """Plot a training curve, raw and smoothed, the scores of the evaluations, and dashed curves of the training
    datasets. An evaluation and a training dataset of the same name have the same colour."""
    from matplotlib.ticker import MaxNLocator

    axes = new_axes(8, 4.5)
    if train:
        name = "training loss" if scales[1] == "loss" else "training reward"
        axes.plot(*zip(*train, strict=True), color=TRAIN_COLOR, alpha=0.25, linewidth=1, label=name)
        plot_smoothed(axes, train, color=TRAIN_COLOR, linewidth=2, label=f"{name}, smoothed")
    colors = dict(zip(dict.fromkeys((*evals, *tasks)), cycle(EVAL_COLORS)))
    for task, points in tasks.items():
        label = f"training: {task}, smoothed"
        plot_smoothed(axes, points, color=colors[task], linewidth=1.2, linestyle="--", label=label)
    for dataset, points in evals.items():
        steps, scores = zip(*points, strict=True)
        color = colors[dataset]
        axes.plot(steps, scores, color=color, marker="o", markersize=5, linewidth=1.2, label=f"eval: {dataset}")
        axes.annotate(
            f"{scores[-1]:.3g}", (steps[-1], scores[-1]), textcoords="offset points", xytext=(6, 4), color=color
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e2e8f0")
    axes.legend(frameon=False, loc="best", fontsize=9)
    return save_axes(axes, out, title, scales)


def new_axes(width: float, height: float) -> Axes:
    """Make the axes of a new plot of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def plot_smoothed(axes: Axes, points: Sequence[tuple[float, float]], **style: Any) -> tuple[float, float]:
    """Plot a smoothed curve of these points; return its last point."""
    steps, heights = zip(*points, strict=True)
    curve = smooth(heights, half_life=max(1.0, math.sqrt(len(heights)) / 2))
    axes.plot(steps, curve, **style)
    return steps[-1], curve[-1]


def save_axes(axes: Axes, out: Path, title: str, scales: tuple[str, str], dpi: int = 150) -> Path:
    """Label the axes, write their plot to a temporary file and move it to `out`."""
    axes.set_title(title, loc="left", color=_INK, fontweight="bold")
    axes.set_xlabel(scales[0], color=_INK)
    axes.set_ylabel(scales[1], color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    figure: Any = axes.figure
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
            [sys.executable, "-P", "-m", __name__, self._metrics, self._metrics.parent, self._title, str(os.getpid())],
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


def _main(metrics: str, folder: str, title: str, driver_pid: str) -> None:
    """Draw with the lowest priority; the kernel ends this process with the driver's thread that started it."""
    os.nice(19)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(driver_pid):
        draw_curves(metrics, folder, title)


if __name__ == "__main__":
    _main(*sys.argv[1:])
