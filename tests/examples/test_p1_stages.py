"""examples/p1_stages: unlearnable prompts are skipped until the next stage, and a staged run learns."""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.config.plugins import load_plugin
from slime.driver.stages import read_stages
from slime.utils.types import Sample
from tests.examples.conftest import EXAMPLES, Ran
from tests.tiny_models import make_model_folder

FOLDER = EXAMPLES / "p1_stages"


@pytest.fixture(scope="module")
def task() -> Any:
    return sys.modules[load_plugin(f"{FOLDER / 'task.py'}:right_answer", "--custom-rm-path").__module__]


@pytest.fixture(scope="module")
def learnability() -> Any:
    return sys.modules[
        load_plugin(f"{FOLDER / 'learnability.py'}:learnable", "--dynamic-sampling-filter-path").__module__
    ]


def test_cart_problems_have_speeds_and_a_reward(task: Any) -> None:
    problem = task.Problem(3, (4, -2))
    assert problem.question == "+4-2........v3"
    assert problem.speeds() == [7, 5]
    assert problem.speeds((True, False)) == [4, 2]
    done = Sample(response=">7>5", label="5", status=Sample.Status.COMPLETED)
    assert task.right_answer(None, done) == 1.0
    cut = Sample(response=">7>5", label="5", status=Sample.Status.TRUNCATED)
    assert task.right_answer(None, cut) == 0.0
    found = task.problems(random.Random(1))
    some = [next(found) for _ in range(200)]
    assert len(set(some)) == 200
    assert all(0 <= speed < task.FASTEST for one in some for speed in one.speeds())


@pytest.mark.parametrize(
    ("rewards", "kept", "reason"),
    [
        ([0, 0, 0, 0], False, "never_solved"),
        ([1, 0, 0, 0], True, None),
        ([1, 1, 1, 0], False, "too_easy"),
        ([None, None], False, "never_solved"),
    ],
)
def test_filter_decides_by_pass_rate(learnability: Any, rewards: list[Any], kept: bool, reason: str) -> None:
    verdict = learnability.learnable(Namespace(pass_rate_most=0.7), [Sample(reward=reward) for reward in rewards])
    assert (verdict.keep, verdict.reason) == (kept, reason)


def test_unlearnable_prompts_are_skipped_until_the_next_stage(learnability: Any, tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model")
    rows = [{"input": f"p{number}", "metadata": {"id": number}} for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = Namespace(
        hf_checkpoint=str(tmp_path / "model"),
        prompt_data=str(tmp_path / "prompts.jsonl"),
        rollout_global_dataset=True,
        n_samples_per_prompt=2,
        pass_rate_most=0.7,
        stage="short",
    )
    source = learnability.LearnablePrompts(given)

    def asked(count: int) -> list[str]:
        return [group[0].prompt for group in source.get_samples(count)]

    groups = source.get_samples(4)
    for group, rewards in zip(groups, [(0, 0), (1, 0), (1, 1), (0, 1)], strict=True):
        for sample, reward in zip(group, rewards, strict=True):
            sample.reward = float(reward)
    source.observe_samples(0, groups)
    assert asked(4) == ["p1", "p3", "p1", "p3"]
    twin = learnability.LearnablePrompts(given)
    twin.load_state_dict(source.state_dict())
    assert [group[0].prompt for group in twin.get_samples(2)] == ["p1", "p3"]
    source.add_samples(source.get_samples(1))
    given.stage = "long"
    later = learnability.LearnablePrompts(given)
    later.load_state_dict(source.state_dict())
    assert (later.buffer, later.metadata) == ([], {"stage": "long", "pass_rates": {}})
    assert sorted(asked(4)) == ["p0", "p1", "p2", "p3"]
    for group in (everything := source.get_samples(4)):
        group[0].reward = group[1].reward = 1.0
    source.observe_samples(1, everything)
    assert sorted(asked(4)) == ["p0", "p1", "p2", "p3"]  # no prompt was left: all are measured again


def test_config_file_has_three_growing_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    flags = ["--hf-checkpoint", "m", "--prompt-data", "p", "--output-dir", str(tmp_path)]
    stages = read_stages(FOLDER / "stages.yaml", flags)
    assert [stage.name for stage in stages] == ["short", "longer", "whole"]
    lengths = [stage.written.rollout_max_response_len for stage in stages]
    sizes = [stage.written.n_samples_per_prompt for stage in stages]
    assert lengths == sorted(set(lengths))
    assert sizes == sorted(set(sizes))


@pytest.mark.examples
def test_staged_run_learns(run_example: Callable[..., Ran], tmp_path: Path) -> None:
    written = yaml.safe_load((FOLDER / "stages.yaml").read_text())
    first, _, last = written["stages"]
    written["stages"] = [{**first, "num_rollout": 4}, {**last, "num_rollout": 4, "n_samples_per_prompt": 8}]
    (tmp_path / "stages.yaml").write_text(yaml.safe_dump(written))
    words = ("--warm-up-steps", "120", "--stages", str(tmp_path / "stages.yaml"), "--seed", "3")
    ran = run_example("p1_stages/run.py", *words)
    assert "stage 1 of 2: short" in ran.output
    before = ran.series("eval/held-out", "1-short")[0]
    after = ran.series("eval/held-out", "2-whole")[-1]
    assert after > before + 0.2
    dropped = ran.series("rollout/dynamic_filter/drop_never_solved", "1-short")
    assert sum(dropped) > 0  # long answers do not fit into the first stage
