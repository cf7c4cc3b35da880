"""The table at the end of a run: what was reached, how fast, and where the files are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from rich.console import Console

from slime.config import Config
from slime.observe.figures import format_seconds
from slime.observe.progress import print_summary


class Finished(Protocol):
    """What the summary needs to know of a run's result."""

    run_dir: Path
    metrics: list[dict[str, Any]]
    evaluations: list[tuple[int, dict[str, Any]]]
    seconds: float
    peak_memory_gib: float


def show_summary(result: Finished, config: Config, plot: Path | None, console: Console) -> None:
    rows = [("steps", str(len(result.metrics))), ("time", format_seconds(result.seconds))]
    rows += _reward(result.metrics)
    for name, _ in config.eval_prompt_data or ():
        rows += _evaluation(name, result.evaluations)
    rows += _speed(result.metrics)
    rows.append(("peak memory", f"{result.peak_memory_gib:.2f} GiB, all processes"))
    rows.append(("metrics", str(result.run_dir / "metrics.jsonl")))
    if plot is not None:
        rows.append(("reward curve", str(plot)))
    if config.save is not None:
        rows.append(("checkpoints", config.save))
    if config.save_hf is not None and result.metrics:
        rows.append(("model", config.save_hf.format(rollout_id=(config.num_rollout or 1) - 1)))
    print_summary(rows, title="Finished", console=console)


def _reward(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    rewards = [m["rollout/raw_reward"] for m in metrics if m.get("rollout/raw_reward") is not None]
    if not rewards:
        return []
    tail = rewards[-min(5, len(rewards)) :]
    return [("training reward", f"{rewards[0]:.3f} first, {fmean(tail):.3f} mean of the last {len(tail)}")]


def _evaluation(name: str, evaluations: Sequence[tuple[int, dict[str, Any]]]) -> list[tuple[str, str]]:
    scores = [(step, m[f"eval/{name}"]) for step, m in evaluations if f"eval/{name}" in m]
    if not scores:
        return []
    shown = f"{scores[0][1]:.3f} (step {scores[0][0]})"
    if len(scores) > 1:
        shown += f" -> {scores[-1][1]:.3f} (step {scores[-1][0]})"
    return [(f"eval {name}", shown)]


def _speed(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    def mean(name: str) -> float | None:
        values = [m[name] for m in metrics if m.get(name) is not None]
        return fmean(values) if values else None

    rows = []
    step = mean("perf/step_time")
    if step is not None:
        parts = [
            ("rollout", "perf/rollout_wait_time"),
            ("train", "perf/train_time"),
            ("weights", "perf/update_weights_time"),
        ]
        shares = ", ".join(f"{title} {value:.2f}" for title, name in parts if (value := mean(name)) is not None)
        rows.append(("seconds per step", f"{step:.2f} ({shares})"))
    tokens = mean("perf/tokens_per_gpu_per_sec")
    if tokens is not None:
        rows.append(("rollout tokens/s", f"{tokens:,.0f} per engine"))
    gap = [
        m["train/train_rollout_logprob_abs_diff_max"]
        for m in metrics
        if "train/train_rollout_logprob_abs_diff_max" in m and not m.get("rollout/off_policy_token_frac")
    ]
    if gap:
        rows.append(("trainer against engine", f"log-probs differ by at most {max(gap):.1e}"))
    age = mean("rollout/staleness/mean")
    if age is not None:
        oldest = max(m["rollout/staleness/max"] for m in metrics if "rollout/staleness/max" in m)
        rows.append(("age of samples", f"{age:.2f} steps on average, {oldest:.0f} at most"))
    return rows
