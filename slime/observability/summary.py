"""The summary table at the end of a run: results, speed, and the paths of the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime.config import Config
from slime.observability.metric_format import format_seconds
from slime.storage.json_types import JsonMapping, JsonObject


class FinishedRun(Protocol):
    """The result of a run, as the summary reads it."""

    run_dir: Path
    metrics: list[JsonObject]
    evaluations: list[tuple[int, JsonObject]]
    seconds: float
    peak_memory_gib: float


def show_summary(
    result: FinishedRun,
    config: Config,
    curves: Mapping[str, Path],
    console: Console,
    *,
    earlier: Sequence[JsonMapping] = (),
) -> None:
    """Print the summary; `earlier` are the records from before a resume, as results count from the first step on."""
    before, evaluated = merge_records(earlier)
    metrics, evaluations = [*before, *result.metrics], [*evaluated, *result.evaluations]
    steps, seconds = str(len(metrics)), format_seconds(result.seconds)
    if before:
        steps, seconds = f"{steps}, {len(result.metrics)} of them since the resume", f"{seconds} since the resume"
    rows = [("steps", steps), ("time", seconds)]
    rewards, losses = ([m.get(name) for m in metrics] for name in ("rollout/raw_reward", "train/loss"))
    rows += _first_and_last("training reward", rewards) or _first_and_last("training loss", losses)
    for name, _ in config.eval_prompt_data or ():
        scores = [(step, m[f"eval/{name}"]) for step, m in evaluations if f"eval/{name}" in m]
        if scores:
            shown = f"{scores[0][1]:.3f} (step {scores[0][0]})"
            if len(scores) > 1:
                shown += f" -> {scores[-1][1]:.3f} (step {scores[-1][0]})"
            rows.append((f"eval {name}", shown))
    rows += _speed(result.metrics)
    rows.append(("peak memory", f"{result.peak_memory_gib:.2f} GiB, all processes"))
    rows.append(("metrics", str(result.run_dir / "metrics.jsonl")))
    rows += [(name, str(path)) for name, path in curves.items()]
    if config.save is not None:
        rows.append(("checkpoints", config.save))
    if config.save_hf is not None and result.metrics:
        rows.append(("model", config.save_hf.format(rollout_id=(config.num_rollout or 1) - 1)))
    print_summary(rows, title="Finished", console=console)


def print_summary(rows: Sequence[tuple[str, str]], *, title: str = "Summary", console: Console | None = None) -> None:
    """Print a two-column table at the end of a run."""
    console = console or Console(highlight=False)
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, min_width=40)
    table.add_column(style="cyan" if console.is_terminal else None, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)


def merge_records(
    records: Sequence[JsonMapping],
) -> tuple[list[JsonObject], list[tuple[int, JsonObject]]]:
    """Convert the records of a metrics file to (one merged dict per rollout, the evaluations), as in a result."""
    rollouts: dict[int, JsonObject] = {}
    evaluations = []
    for record in records:
        if record["kind"] == "eval":
            evaluations.append((record["step"], dict(record)))
        else:
            rollouts.setdefault(record["rollout_id"], {}).update(record)
    return [rollouts[number] for number in sorted(rollouts)], evaluations


def _first_and_last(title: str, values: Sequence[float | None]) -> list[tuple[str, str]]:
    known = [value for value in values if value is not None]
    if not known:
        return []
    tail = known[-min(5, len(known)) :]
    return [(title, f"{known[0]:.3f} first, {fmean(tail):.3f} mean of the last {len(tail)}")]


def _speed(metrics: Sequence[JsonObject]) -> list[tuple[str, str]]:
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
