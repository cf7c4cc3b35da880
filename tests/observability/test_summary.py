"""Summary table at the end of a run: rows only for available metrics."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from slime.config import Config
from slime.driver.inputs import TrainingResult
from slime.observability.summary import show_summary

SUPERVISED = {"train/loss": 2.0, "perf/rollout_wait_time": 0.25, "perf/train_time": 0.75, "perf/step_time": 1.0}
GENERATED = {
    "rollout/raw_reward": 0.5,
    "perf/tokens_per_gpu_per_sec": 1234.0,
    "train/train_rollout_logprob_abs_diff_max": 2e-6,
}


def rows(
    metrics: list[dict[str, Any]],
    *,
    earlier: Sequence[dict[str, Any]] = (),
    evaluations: Sequence[tuple[int, dict[str, Any]]] = (),
    **flags: Any,
) -> dict[str, str]:
    target = Console(file=io.StringIO(), width=120)
    result = TrainingResult(Path("run"), metrics, list(evaluations), seconds=3.0, peak_memory_gib=1.5)
    config = Config(hf_checkpoint="x", num_rollout=len(metrics), **flags)
    show_summary(result, config, {"loss curve": Path("run/loss.png")}, target, earlier=earlier)
    assert isinstance(target.file, io.StringIO)
    cells = [line.split("│")[1:3] for line in target.file.getvalue().splitlines() if "│" in line]
    return {name.strip(): value.strip() for name, value in cells}


def test_sft_summary_omits_reward_and_rollout_speed() -> None:
    assert rows([SUPERVISED, SUPERVISED], save_hf="hf_{rollout_id}") == {
        "steps": "2",
        "time": "0:03",
        "training loss": "2.000 first, 2.000 mean of the last 2",
        "seconds per step": "1.00 (rollout 0.25, train 0.75)",
        "peak memory": "1.50 GiB, all processes",
        "metrics": "run/metrics.jsonl",
        "loss curve": "run/loss.png",
        "model": "hf_1",
    }


def test_rl_summary_includes_reward_and_rollout_speed() -> None:
    shown = rows([SUPERVISED | GENERATED, SUPERVISED | GENERATED | {"rollout/raw_reward": 1.0}])
    assert shown["training reward"] == "0.500 first, 0.750 mean of the last 2"
    assert shown["rollout tokens/s"] == "1,234 per engine"
    assert shown["trainer against engine"] == "log-probs differ by at most 2.0e-06"


def test_summary_after_a_resume_covers_the_whole_run() -> None:
    earlier = [
        {"kind": "eval", "step": 0, "rollout_id": 0, "eval/math": 0.125},
        {"kind": "train", "step": 0, "rollout_id": 0, "train/loss": 9.0},
        {"kind": "train", "step": 1, "rollout_id": 0, "train/loss": 8.0},
        {"kind": "rollout", "step": 0, "rollout_id": 0, "rollout/raw_reward": 0.25},
        {"kind": "rollout", "step": 1, "rollout_id": 1, "rollout/raw_reward": 0.5},
        {"kind": "eval", "step": 2, "rollout_id": 1, "eval/math": 0.25},
    ]
    evaluations = [(3, {"eval/math": 0.75})]
    shown = rows([GENERATED], earlier=earlier, evaluations=evaluations, eval_prompt_data=[("math", "m.jsonl")])
    assert shown["steps"] == "3, 1 of them since the resume"
    assert shown["time"] == "0:03 since the resume"
    assert shown["training reward"] == "0.250 first, 0.417 mean of the last 3"
    assert shown["eval math"] == "0.125 (step 0) -> 0.750 (step 3)"
