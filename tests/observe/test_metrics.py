from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime.config import Config
from slime.errors import UserError
from slime.observe.metrics import MetricsLog, read_metrics

CONFIG = Config(hf_checkpoint="x", use_tensorboard=False)
BOARD = Config(hf_checkpoint="x", use_tensorboard=True)


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "time"} for record in records]


def run(folder: Path, rollouts: range, config: Config = CONFIG) -> None:
    """A run of two optimizer steps per rollout, evaluating after every second rollout."""
    with MetricsLog(folder, config, start_rollout_id=rollouts.start) as log:
        for rollout_id in rollouts:
            log.log({"rollout/raw_reward": rollout_id / 10}, rollout_id)
            for step in (2 * rollout_id, 2 * rollout_id + 1):
                log.log({"train/loss": 1.0 / (step + 1)}, step, "train", rollout_id=rollout_id)
            if rollout_id % 2:
                log.log({"eval/held_out": rollout_id / 5}, rollout_id + 1, "eval", rollout_id=rollout_id)


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_record_is_one_line_with_its_values(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, CONFIG) as log:
        log.log(
            {"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": True, "e": "text", "f": None},
            3,
            "train",
            rollout_id=1,
        )
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # visible before close
    record = json.loads(line)
    assert record.pop("time") > 1.6e9
    assert record == {
        "kind": "train", "step": 3, "rollout_id": 1, "a": 1, "b": 0.5, "c": 2.0, "d": True, "e": "text", "f": None,
    }  # fmt: skip


def test_values_that_are_not_finite_become_null_and_are_counted(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, BOARD) as log:
        log.log({"x": float("nan"), "y": np.float64("inf"), "z": 1.0}, 0)
        log.log({"x": -float("inf")}, 1)
        assert log.nonfinite == 3
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["x"], first["y"], first["z"], first["nonfinite_values"]) == (None, None, 1.0, 2)
    assert second["x"] is None
    assert scalars(tmp_path, "z") == [(0, 1.0)]


def test_what_is_no_single_number_is_refused_by_name(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, CONFIG) as log, pytest.raises(TypeError, match="rollout/list is a list"):
        log.log({"rollout/list": [1, 2]}, 0)


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path: Path) -> None:
    run(tmp_path / "whole", range(0, 6))
    run(tmp_path / "resumed", range(0, 4))  # saved after rollout 1, went on to 3, was killed while writing
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rollout", "step": 4, "rol')
    run(tmp_path / "resumed", range(2, 6))
    whole, resumed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed"))
    assert without_time(resumed) == without_time(whole)
    assert len(whole) == 6 * 3 + 3


def test_tensorboard_shows_a_resumed_run_like_an_uninterrupted_one(tmp_path: Path) -> None:
    run(tmp_path, range(0, 4), BOARD)
    run(tmp_path, range(2, 6), BOARD)
    rewards = scalars(tmp_path, "rollout/raw_reward")
    assert [step for step, _ in rewards] == [0, 1, 2, 3, 4, 5]
    assert [value for _, value in rewards] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == list(range(12))


def test_the_metrics_of_an_earlier_run_are_set_aside(tmp_path: Path) -> None:
    for _ in range(3):
        run(tmp_path, range(0, 2))
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl",
    ]  # fmt: skip
    assert len(read_metrics(tmp_path / "metrics.1.jsonl")) == len(read_metrics(tmp_path / "metrics.jsonl")) == 7


def test_tensorboard_names_make_folders(tmp_path: Path) -> None:
    config = BOARD.replace(tb_project_name="project", tb_experiment_name="trial")
    with MetricsLog(tmp_path, config) as log:
        log.log({"x": 1.0}, 0)
    assert list((tmp_path / "tensorboard" / "project" / "trial").glob("events.*"))


def test_wandb_that_is_not_installed_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="--use-wandb needs the package wandb"):
        MetricsLog(tmp_path, CONFIG.replace(use_wandb=True))
