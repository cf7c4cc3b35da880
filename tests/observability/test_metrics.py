from __future__ import annotations

import html
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard import plugin_util
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime.config import Config
from slime.errors import UserError
from slime.observability.metrics import MetricsLog, read_metrics
from slime.observability.trackers import markdown_table

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


def test_metrics_record_is_one_json_line(tmp_path: Path) -> None:
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


def test_non_finite_values_become_null_and_are_counted(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, BOARD) as log:
        log.log({"x": float("nan"), "y": np.float64("inf"), "z": 1.0}, 0)
        log.log({"x": -float("inf")}, 1)
        assert log.nonfinite == 3
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["x"], first["y"], first["z"], first["nonfinite_values"]) == (None, None, 1.0, 2)
    assert second["x"] is None
    assert scalars(tmp_path, "z") == [(0, 1.0)]


def test_list_metric_is_rejected_by_name(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, CONFIG) as log, pytest.raises(TypeError, match="rollout/list is a list"):
        log.log({"rollout/list": [1, 2]}, 0)


def test_resumed_run_writes_the_same_metrics_as_an_uninterrupted_one(tmp_path: Path) -> None:
    run(tmp_path / "whole", range(0, 6))
    run(tmp_path / "resumed", range(0, 4))  # checkpoint after rollout 1, killed while writing rollout 4
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rollout", "step": 4, "rol')
    run(tmp_path / "resumed", range(2, 6))
    whole, resumed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed"))
    assert without_time(resumed) == without_time(whole)
    assert len(whole) == 6 * 3 + 3


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    run(tmp_path, range(0, 4), BOARD)
    run(tmp_path, range(2, 6), BOARD)
    rewards = scalars(tmp_path, "rollout/raw_reward")
    assert [step for step, _ in rewards] == [0, 1, 2, 3, 4, 5]
    assert [value for _, value in rewards] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == list(range(12))


def test_metrics_of_an_earlier_run_are_renamed(tmp_path: Path) -> None:
    for _ in range(3):
        run(tmp_path, range(0, 2))
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl",
    ]  # fmt: skip
    assert len(read_metrics(tmp_path / "metrics.1.jsonl")) == len(read_metrics(tmp_path / "metrics.jsonl")) == 7


def test_tensorboard_project_and_experiment_become_folders(tmp_path: Path) -> None:
    config = BOARD.replace(tb_project_name="project", tb_experiment_name="trial")
    with MetricsLog(tmp_path, config) as log:
        log.log({"x": 1.0}, 0)
    assert list((tmp_path / "tensorboard" / "project" / "trial").glob("events.*"))


def test_missing_wandb_package_raises_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="--use-wandb needs the package wandb"):
        MetricsLog(tmp_path, CONFIG.replace(use_wandb=True))


# tables of completions


def row(response: str = "4", **changes: Any) -> dict[str, Any]:
    return {"prompt": "2+2?", "response": response, "label": "4", "reward": 1.0} | changes


def run_with_completions(folder: Path, rollouts: range) -> None:
    with MetricsLog(folder, BOARD, start_rollout_id=rollouts.start) as log:
        for rollout_id in rollouts:
            log.log({"rollout/raw_reward": 0.5}, rollout_id)
            log.log_completions("rollout", [row(f"answer {rollout_id}")], rollout_id, "rollout", rollout_id=rollout_id)
            log.log_completions("eval/sums", [row()], rollout_id + 1, "eval", rollout_id=rollout_id)


def texts(folder: Path, name: str) -> list[tuple[int, str]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found = events.Tensors(f"{name}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def test_tensorboard_shows_each_completion_once_after_a_resume(tmp_path: Path) -> None:
    run_with_completions(tmp_path, range(0, 4))
    run_with_completions(tmp_path, range(2, 5))
    shown = texts(tmp_path, "rollout/completions")
    assert [step for step, _ in shown] == [0, 1, 2, 3, 4]
    assert shown[3][1] == markdown_table([row("answer 3")])
    assert [step for step, _ in texts(tmp_path, "eval/sums/completions")] == [1, 2, 3, 4, 5]
    records = read_metrics(tmp_path / "completions.jsonl")
    assert [record["rows"] for record in records if record["name"] == "rollout"] == [
        [row(f"answer {number}")] for number in range(5)
    ]
    run_with_completions(tmp_path, range(0, 1))  # a new run in the same folder
    assert len(read_metrics(tmp_path / "completions.jsonl")) == 2
    assert len(read_metrics(tmp_path / "completions.1.jsonl")) == 10


@pytest.mark.parametrize(
    "text",
    [
        "a|b||c", "`x` and ``y``", "*bold* _it_ **b**", "<script>alert(1)</script> &lt;", "\\| \\frac{1}{2} $x$",
        "[link](http://x.y) ![i](z)", "# not a title", "- no\n- list", "1. no list", "https://example.com", "a\n\n\nb",
    ],
)  # fmt: skip
def test_markdown_table_escapes_every_character(text: str) -> None:
    shown = plugin_util.markdown_to_safe_html(markdown_table([row(text, prompt=text)]))
    cells = re.findall(r"<td>(.*?)</td>", shown, re.DOTALL)
    assert len(cells) == 4
    for cell in cells[:2]:
        assert "<" not in cell.replace("<br>", "")
        assert html.unescape(cell.replace("<br>", "\n")) == text


def test_completions_with_surrogates_and_nan_rewards_are_shown(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, BOARD) as log:
        rows = [row("half \ud800", reward=float("nan"), label=""), row(reward=None)]
        log.log_completions("rollout", rows, 0, "rollout", rollout_id=0)
        log.log_completions("rollout", [], 1, "rollout", rollout_id=1)
    ((step, text),) = texts(tmp_path, "rollout/completions")
    assert step == 0
    assert "half ?" in text
    assert "| nan |" in text


class WandbDouble(SimpleNamespace):
    """Stands in for the module `wandb` and records calls."""

    def __init__(self) -> None:
        self.id = "made up by W&B"
        self.inits: list[dict[str, Any]] = []
        self.axes: dict[str, str | None] = {}
        self.logged: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def login(self, host: str) -> None:
        self.keys.append(os.environ.get("WANDB_API_KEY"))

    def init(self, **options: Any) -> WandbDouble:
        self.inits.append(options)
        self.keys.append(os.environ.get("WANDB_API_KEY"))
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        assert name not in self.axes, "declared twice"
        self.axes[name] = step_metric

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None: ...

    class Table(SimpleNamespace):
        """Keeps the arguments it was made with."""


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> WandbDouble:
    double = WandbDouble()
    monkeypatch.setitem(sys.modules, "wandb", double)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_DIR", raising=False)
    return double


def test_wandb_axes_follow_the_prefix_of_each_metric(tmp_path: Path, wandb: WandbDouble) -> None:
    with MetricsLog(tmp_path, CONFIG.replace(use_wandb=True)) as log:
        for rollout_id in (0, 1):
            log.log({"train/loss": 0.5, "train/step": 7, "own": 1}, 7, "train", rollout_id=rollout_id)
            metrics = {"rollout/raw_reward": 0.5, "perf/step_time": 2.0, "passrate/pass@1": 1.0}
            log.log(metrics, rollout_id, "rollout", rollout_id=rollout_id)
        log.log({"eval/sums": 0.5}, 2, "eval", rollout_id=1)
    assert wandb.axes == {
        "train/step": None, "train/*": "train/step", "own": "train/step",
        "rollout/step": None, "rollout/*": "rollout/step", "perf/step": None, "perf/*": "perf/step",
        "passrate/step": None, "passrate/*": "passrate/step", "eval/step": None, "eval/*": "eval/step",
    }  # fmt: skip
    assert wandb.logged[0] == {"train/loss": 0.5, "train/step": 7, "own": 1}
    assert wandb.logged[3] == {
        "rollout/raw_reward": 0.5, "perf/step_time": 2.0, "passrate/pass@1": 1.0,
        "rollout/step": 1, "perf/step": 1, "passrate/step": 1,
    }  # fmt: skip
    assert wandb.logged[4] == {"eval/sums": 0.5, "eval/step": 2}
    assert log.wandb_run_id == wandb.id


def test_wandb_receives_a_table_of_completions(tmp_path: Path, wandb: WandbDouble) -> None:
    with MetricsLog(tmp_path, CONFIG.replace(use_wandb=True)) as log:
        log.log_completions("eval/sums", [row(), row("5", reward="{}")], 3, "eval", rollout_id=2)
    (logged,) = wandb.logged
    assert logged.keys() == {"eval/sums/completions", "eval/step"}
    assert logged["eval/step"] == 3
    assert vars(logged["eval/sums/completions"]) == {
        "columns": ["prompt", "response", "label", "reward"],
        "data": [["2+2?", "4", "4", 1.0], ["2+2?", "5", "4", "{}"]],
        "allow_mixed_types": True,
    }


@pytest.mark.parametrize("before", [None, "of-somebody-else"])
def test_wandb_key_is_set_only_during_login_and_init(
    tmp_path: Path, wandb: WandbDouble, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
    else:
        monkeypatch.setenv("WANDB_API_KEY", before)
    config = CONFIG.replace(use_wandb=True, wandb_key="s3cret", wandb_host="http://w")
    MetricsLog(tmp_path, config).close()
    assert wandb.keys == ["s3cret", "s3cret"], "at login and init"
    assert os.environ.get("WANDB_API_KEY") == before
    assert "s3cret" not in repr(wandb.inits) + repr(config) + repr(config.to_dict())
    assert config.wandb_key == "s3cret"
    assert Config.from_dict(config.to_dict()) == config


def test_wandb_always_use_train_step_logs_optimizer_steps(tmp_path: Path, wandb: WandbDouble) -> None:
    sizes = {"rollout_batch_size": 3, "n_samples_per_prompt": 4, "global_batch_size": 8}
    with MetricsLog(tmp_path, CONFIG.replace(use_wandb=True, wandb_always_use_train_step=True, **sizes)) as log:
        log.log({"train/loss": 0.5}, 7, "train", rollout_id=5)
        for rollout_id in (0, 1, 5):
            log.log({"rollout/raw_reward": 0.5}, rollout_id, "rollout", rollout_id=rollout_id)
        log.log({"eval/sums": 0.5}, 2, "eval", rollout_id=1)
    assert [next(v for k, v in logged.items() if k.endswith("/step")) for logged in wandb.logged] == [7, 0, 1, 7, 3]


@pytest.mark.parametrize(("given", "environment"), [(None, None), ("mine", None), (None, "theirs"), ("mine", "theirs")])
def test_wandb_dir_defaults_to_the_run_folder(
    tmp_path: Path, wandb: WandbDouble, monkeypatch: pytest.MonkeyPatch, given: str | None, environment: str | None
) -> None:
    if environment is not None:
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / environment))
    folder = None if given is None else str(tmp_path / given)
    MetricsLog(tmp_path / "run", CONFIG.replace(use_wandb=True, wandb_dir=folder)).close()
    expected = tmp_path / (given or environment or "run")
    assert wandb.inits[0]["dir"] == str(expected)
    assert expected.is_dir()


def test_foreign_event_files_are_kept(tmp_path: Path) -> None:
    theirs = tmp_path / "tensorboard" / "events.out.tfevents.1700000000.host.1.0"
    theirs.parent.mkdir()
    theirs.write_bytes(b"theirs")
    for _ in range(2):
        MetricsLog(tmp_path, BOARD).close()
    assert theirs.read_bytes() == b"theirs"
    assert len(list(theirs.parent.iterdir())) == 2
