"""What a finished run leaves, and how the same command finds that there is nothing left to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.config import Config
from slime.config.eval_datasets import evaluates
from slime.config.start import continues_itself, resumes_at
from slime.observe.metrics import read_metrics
from slime.observe.summary import earlier_metrics
from slime.plan import needs_engines


@dataclass
class TrainingResult:
    """What a finished run leaves: its folder, one merged metrics dict per rollout, and the evaluations."""

    run_dir: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    seconds: float = 0.0
    peak_memory_gib: float = 0.0


def finished_before(config: Config, total: int) -> TrainingResult | None:
    """The result of a run that the same command has finished already, said on the screen; None if anything is left."""
    if not total or not continues_itself(config) or config.start_rollout_id is not None or config.debug_rollout_only:
        return None
    start = resumes_at(config)
    if start < total or (config.save_hf and not Path(config.save_hf.format(rollout_id=total - 1)).is_dir()):
        return None
    folder = Path(config.output_dir)
    records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    result = TrainingResult(folder, *earlier_metrics(records))
    logs_itself = config.custom_eval_rollout_log_function_path is not None
    if evaluates(config) and needs_engines(config) and not logs_itself and start not in dict(result.evaluations):
        return None
    print(
        f"this run is finished: {config.save} has a checkpoint after step {start}, and --num-rollout is {total}; raise "
        f"it to go on, or choose another --save to begin anew (metrics and curves are in {folder})"
    )
    return result
