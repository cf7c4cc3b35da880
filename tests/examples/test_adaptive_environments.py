"""examples/adaptive_environments (RLVE): verifiers, levels that follow success, and a run that raises them."""

from __future__ import annotations

import itertools
import json
import random
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config.plugins import load_plugin
from slime.utils.types import Sample
from tests.examples.conftest import EXAMPLES, Ran

FOLDER = EXAMPLES / "adaptive_environments"


@pytest.fixture(scope="module")
def source() -> Any:
    """The module named by --data-source-path."""
    return sys.modules[load_plugin(f"{FOLDER / 'source.py'}:AdaptiveEnvironments", "--data-source-path").__module__]


@pytest.fixture
def environments(source: Any) -> dict[str, Any]:
    return dict(source.ENVIRONMENTS)


def test_environments_accept_their_own_answers_at_every_level(environments: dict[str, Any]) -> None:
    assert len(environments) == 14
    assert len({one.letter for one in environments.values()}) == 14
    rng = random.Random(3)
    for environment, level in itertools.product(environments.values(), range(1, 13)):
        for _ in range(10):
            question = environment.question(level, rng)
            answer = environment.solve(question)
            assert environment.verify(question, answer), (environment.name, question, answer)
            for wrong in ("", f"{answer}x", "?"):
                assert not environment.verify(question, wrong), (environment.name, question, wrong)


@pytest.mark.parametrize(
    ("name", "question", "right", "wrong"),
    [
        ("addition", "3+11", ["14"], ["15", "41"]),
        ("modulo", "17%5", ["2"], ["3"]),
        ("binary", "11", ["1011"], ["1101", "01011"]),
        ("sorting", "3142", ["1234"], ["4321"]),
        ("counting", "c:abccab", ["2"], ["3"]),
        ("editing", "b:abcb", ["ac"], ["acb", "ca"]),
        ("brackets", "([]{", ["})", "()})"], [")}", "}", "})("]),
        ("shortest path", "ab,bd,ac,cd:ad", ["abd", "acd"], ["ad", "abdcd", "acb", "dba"]),
        ("maze", "s.#/..g", ["rdr", "drr", "drlrr"], ["rr", "rdd", "dr", "urdr"]),
        ("intersection", "abc&bcd", ["bc", "cb"], ["b", "bcc", "bcd"]),
        ("sequence", "2,5,8", ["11"], ["10"]),
        ("satisfy", "2:a+b,A+B", ["01", "10"], ["00", "11", "1", "0101"]),
        ("ordering", "a<b,a<c", ["abc", "acb"], ["bac", "ab", "abcc"]),
        ("subset sum", "3585:8", ["8", "35", "53"], ["44", "358", "55", "²"]),
    ],
)
def test_verifiers_accept_right_and_reject_wrong_answers(
    environments: dict[str, Any], name: str, question: str, right: list[str], wrong: list[str]
) -> None:
    for answer in right:
        assert environments[name].verify(question, answer), answer
    for answer in wrong:
        assert not environments[name].verify(question, answer), answer


def test_level_rises_when_solved_and_falls_when_not(source: Any) -> None:
    one = source.Difficulty(3)
    one.observe(2, [0.0] * 64)  # another level: ignored
    assert (one.level, one.seen) == (3, 0)
    one.observe(3, [1.0] * 24)
    assert one.level == 3  # not enough answers yet
    one.observe(3, [1.0] * 8)
    assert (one.level, one.seen) == (4, 0)
    one.observe(4, [1.0, 0.0] * 16)
    assert (one.level, one.seen, one.right) == (4, 16, 8.0)
    one.observe(4, [0.0] * 24)
    one.observe(4, [0.0] * 40)
    assert one.level == 3
    at_first = source.Difficulty(1)
    at_first.observe(1, [0.0] * 32)
    assert at_first.level == 1


def test_environments_with_medium_success_are_sampled_most(source: Any, tmp_path: Path) -> None:
    made = source.AdaptiveEnvironments(Namespace(rollout_seed=1, output_dir=str(tmp_path)))
    made.difficulties["sorting"] = source.Difficulty(5, right=10, seen=20)
    made.difficulties["maze"] = source.Difficulty(2, right=24, seen=24)
    made.difficulties["binary"] = source.Difficulty(2, right=0, seen=24)
    samples = made.get_samples(2000)
    count = {name: sum(one.metadata["environment"] == name for one in samples) for name in made.difficulties}
    assert count["sorting"] > 3 * max(count["maze"], count["binary"]) > 0
    levels = {one.metadata["level"] for one in samples if one.metadata["environment"] == "sorting"}
    assert levels == {1, 2, 3, 4, 5}
    assert all(source.right_answer(None, with_right_answer(source, one)) == 1.0 for one in samples[:100])


def with_right_answer(source: Any, sample: Sample) -> Sample:
    environment = source.ENVIRONMENTS[sample.metadata["environment"]]
    sample.response = environment.solve(sample.metadata["question"]) + " "
    return sample


def test_loaded_state_continues_with_the_same_problems(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "log", lambda *_: None)
    args = Namespace(rollout_seed=1, output_dir=str(tmp_path))
    first = source.AdaptiveEnvironments(args)
    for rollout_id in range(3):
        groups = [[one, one] for one in first.get_samples(40)]
        for (one, _), reward in zip(groups, itertools.cycle([1.0, 1.0, 0.0]), strict=False):
            one.reward = reward
        first.observe_samples(rollout_id, groups)
    second = source.AdaptiveEnvironments(args)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [one.prompt for one in second.get_samples(20)] == [one.prompt for one in first.get_samples(20)]
    assert second.history == json.loads((tmp_path / source.CURVES).read_text())
    assert [row["rollout"] for row in second.history] == [0, 1, 2]


@pytest.mark.examples
@pytest.mark.long
def test_run_raises_levels_and_evaluation_score(run_example: Callable[..., Ran]) -> None:
    ran = run_example("adaptive_environments/run.py", "--warm-up-steps", "160", "--steps", "13", "--seed", "3")
    history = json.loads((ran.folder / "difficulty.json").read_text())
    assert [row["rollout"] for row in history] == list(range(13))
    assert sum(history[0]["levels"].values()) <= 16
    risen = [name for name, level in history[-1]["levels"].items() if level > 1]
    assert len(risen) >= 4, history[-1]
    first, *_, last = ran.series("eval/all-levels")
    assert last > first + 0.05
    assert (ran.folder / "difficulty.png").is_file()
