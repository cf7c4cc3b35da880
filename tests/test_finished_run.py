"""Repeating the command of a finished run returns its result, unless a part of its output is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config
from slime.driver.inputs import find_finished_result
from slime.errors import UserError

RECORDS = [
    {"kind": "rollout", "step": 0, "rollout_id": 0, "rollout/raw_reward": 0.25},
    {"kind": "train", "step": 0, "rollout_id": 0, "train/loss": 1.0},
    {"kind": "rollout", "step": 1, "rollout_id": 1, "rollout/raw_reward": 0.5},
    {"kind": "eval", "step": 2, "rollout_id": 1, "eval/math": 0.75},
]


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, Any]:
    checkpoint = tmp_path / "iter_0000001"
    checkpoint.mkdir()
    (checkpoint / "meta.json").write_text(json.dumps({"next_rollout_id": 2}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    folder = str(tmp_path)
    return {"hf_checkpoint": "x", "save": folder, "load": folder + "/", "output_dir": folder}


def test_finished_run_is_reported_and_its_result_returned(
    flags: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = find_finished_result(Config(**flags, eval_prompt_data=[("math", "m.jsonl")], eval_interval=1), 2)
    assert result is not None
    assert [metrics["rollout/raw_reward"] for metrics in result.metrics] == [0.25, 0.5]
    assert result.metrics[0]["train/loss"] == 1.0
    assert [(step, metrics["eval/math"]) for step, metrics in result.evaluations] == [(2, 0.75)]
    said = capsys.readouterr().out
    assert said.startswith(f"this run is finished: {flags['save']} has a checkpoint after step 2, and --num-rollout is")


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({}, 3),  # rollouts remain
        ({"save": "elsewhere"}, 2),  # another run starts from this checkpoint
        ({"load": None}, 2),
        ({"start_rollout_id": 0}, 2),
        ({"save_hf": "not/there/{rollout_id}"}, 2),  # killed before the model was written
        ({"eval_prompt_data": [("math", "m.jsonl")], "eval_interval": 1, "metrics": ""}, 2),  # or before its evaluation
        ({"debug_rollout_only": True}, 2),
    ],
)
def test_incomplete_or_different_run_is_not_finished(
    flags: dict[str, Any], changes: dict[str, Any], total: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "metrics" in changes:
        (tmp_path / "metrics.jsonl").write_text(changes.pop("metrics"))
    assert find_finished_result(Config(**(flags | changes)), total) is None
    assert capsys.readouterr().out == ""


def test_missing_checkpoint_is_not_finished_and_damaged_one_is_rejected(flags: dict[str, Any], tmp_path: Path) -> None:
    fresh = str(tmp_path / "fresh")
    assert find_finished_result(Config(**(flags | {"save": fresh, "load": fresh})), 2) is None
    (tmp_path / "iter_0000001" / "meta.json").write_text("{")
    with pytest.raises(UserError, match="the checkpoint is damaged"):
        find_finished_result(Config(**flags), 2)
