"""examples/multi_task: three tasks in one run, each with its own data, reward, weight and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from slime.config import Config, derive
from slime.config.datasets import eval_datasets, train_datasets
from slime.config.plugins import load_plugin
from slime.utils.types import Sample
from tests.examples.conftest import EXAMPLES, Ran, modules_of

FOLDER = EXAMPLES / "multi_task"
TASKS = ("copy", "sort", "next")


@pytest.fixture
def tasks() -> Iterator[ModuleType]:
    with modules_of(FOLDER) as module:
        yield module("tasks")


def test_problems_have_an_answer_and_a_different_slip(tasks: Any) -> None:
    for task, number, wanted in (
        ("copy", 4729, ("c4729=", "4729", "4792")),
        ("sort", 472, ("s472=", "247", "472")),
        ("next", 79, ("n079=", "180", "079")),
    ):
        drawn = SimpleNamespace(randrange=lambda limit, number=number: number)
        assert tasks.TASKS[task](drawn) == wanted
        assert all(problem.slip != problem.answer for problem in tasks.distinct(task, 1))


def test_rewards_for_exact_and_per_digit_match(tasks: Any) -> None:
    def answered(response: str) -> Sample:
        return Sample(response=response, label="247")

    assert [tasks.same(None, answered(text)) for text in ("247", "274", "2475", "")] == [1.0, 0.0, 0.0, 0.0]
    assert [tasks.places(None, answered(text)) for text in ("247", "742", "2475")] == [1.0, 1 / 3, 0.0]


def test_files_match_the_config_and_held_out_rows_are_excluded(tasks: Any, tmp_path: Path) -> None:
    files = tasks.write_files(tmp_path, shown=90, seed=1)
    flags = {"hf_checkpoint": "m", "rollout_batch_size": 4, "rollout_max_response_len": 5}
    config = derive(Config(**flags, prompt_config=str(files.config), eval_config=str(files.config)))
    trained, evaluated = train_datasets(config), eval_datasets(config)
    assert [(one.name, one.weight, one.max_response_len) for one in trained] == [
        ("copy", 2, 5),
        ("sort", 1, 4),
        ("next", 1, 4),
    ]
    assert [(one.name, one.temperature) for one in evaluated] == [(task, 0) for task in TASKS]
    rows = {one.path: set(Path(one.path).read_text().splitlines()) for one in (*trained, *evaluated)}
    for one, held_out in zip(trained, evaluated, strict=True):
        assert len(rows[held_out.path]) == 128
        assert len(rows[one.path]) > 400
        assert not rows[one.path] & rows[held_out.path]
        if one.custom_rm_path is not None:
            load_plugin(one.custom_rm_path, "--custom-rm-path")
    assert (trained[2].rm_type, yaml.safe_load(files.config.read_text()).keys()) == ("f1", {"train", "eval"})
    assert len(files.demonstrations.read_text().splitlines()) == 90


@pytest.mark.examples
@pytest.mark.long
def test_run_learns_all_three_tasks(run_example: Callable[..., Ran]) -> None:
    ran = run_example("multi_task/run.py", "--warm-up-steps", "120", "--steps", "10", "--seed", "3")
    rises = {task: scores[-1] - scores[0] for task in TASKS for scores in [ran.series(f"eval/{task}")]}
    assert min(rises.values()) > 0.05, rises  # 0.10 to 0.23 after 8 steps with seeds 1 to 3
    assert sum(rises.values()) / 3 > 0.2, rises  # 0.29 to 0.42
    shares = [[row[f"rollout/{task}/share"] for task in TASKS] for row in ran.metrics() if row["kind"] == "rollout"]
    assert shares == [[0.5, 0.25, 0.25]] * 10
    assert (ran.folder / "reward.png").is_file()
