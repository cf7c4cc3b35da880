"""examples/multi_agent: questions and rewards of each role, and learning of the team."""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

from slime.data.sample import Sample
from tests.examples.conftest import EXAMPLES, Ran, modules_of

FOLDER = EXAMPLES / "multi_agent"


@pytest.fixture
def team() -> Iterator[ModuleType]:
    with modules_of(FOLDER) as read:
        yield read("team")


def play(
    team: ModuleType, monkeypatch: pytest.MonkeyPatch, script: dict[str, list[str]], *, evaluation: bool = False
) -> tuple[list[Sample], list[tuple[str, str]]]:
    """Play one rollout with scripted answers per role; return its samples and the (role, question) pairs."""
    left, asked = {role: list(said) for role, said in script.items()}, list[tuple[str, str]]()

    async def act(args: Any, sample: Sample, params: Any, role: str, text: str) -> Any:
        asked.append((role, text))
        said = left[role].pop(0)
        await asyncio.sleep(0)
        return team.Part(said, [Sample(response=said, metadata={"role": role})])

    monkeypatch.setattr(team, "act", act)
    sample = Sample(prompt=[{"role": "user", "content": "3 9 4 1 7"}], label="9")
    return asyncio.run(team.generate(Namespace(), sample, {}, evaluation)), asked


SCRIPT = {"solve": ["9", "7", "9"], "check": ["right", "right", "wrong", "wrong"], "choose": ["9"]}


def test_each_role_gets_its_own_question_and_reward(team: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, asked = play(team, monkeypatch, SCRIPT)
    planted = asked[6][1].split()[-1]
    assert planted in "3417"
    assert asked == [
        *[("solve", "3 9 4 1 7")] * 3,
        ("check", "3 9 4 1 7 answer 9"),
        ("check", "3 9 4 1 7 answer 7"),
        ("check", "3 9 4 1 7 answer 9"),
        ("check", f"3 9 4 1 7 answer {planted}"),
        ("choose", "3 9 4 1 7 answers 9 right 7 right 9 wrong"),
    ]
    assert [sample.metadata["own"] for sample in samples] == [1, 0, 1, 1, 0, 0, 1, 1]
    assert [sample.reward for sample in samples] == pytest.approx([1.0, 0.2, 1.0, 1.0, 0.2, 0.2, 1.0, 1.0])
    truths = [sample.metadata.get("truth") for sample in samples]
    assert truths == [None] * 3 + ["right", "wrong", "right", "wrong", None]


def test_team_failure_lowers_every_reward(team: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _ = play(team, monkeypatch, {**SCRIPT, "choose": ["7"]})
    assert [sample.reward for sample in samples] == pytest.approx([0.8, 0.0, 0.8, 0.8, 0.0, 0.0, 0.8, 0.0])
    assert not any(sample.remove_sample for sample in samples)


def test_judge_without_a_right_answer_is_removed_from_training(
    team: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, _ = play(team, monkeypatch, {"solve": ["1", "7", "3"], "check": ["wrong"] * 4, "choose": ["7"]})
    assert [sample.remove_sample for sample in samples] == [False] * 7 + [True]


def test_evaluation_returns_only_the_team_result(team: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, asked = play(team, monkeypatch, SCRIPT, evaluation=True)
    assert [role for role, _ in asked] == ["solve"] * 3 + ["check"] * 3 + ["choose"]  # no planted answer to check
    assert [(sample.metadata["role"], sample.reward) for sample in samples] == [("choose", 1.0)]


def test_rewards_are_normalized_within_a_role(team: ModuleType) -> None:
    def sample(role: str, reward: float, group: int = 0, **more: Any) -> Sample:
        return Sample(group_index=group, metadata={"role": role}, reward=reward, **more)

    samples = [
        sample("solve", 0.0),
        sample("solve", 0.2),
        sample("check", 0.9),
        sample("check", 1.0),
        sample("choose", 1.0),
        sample("choose", 0.0, remove_sample=True),
        sample("solve", 1.0, 1),
    ]
    raw, shaped = team.by_role(Namespace(), samples)
    assert raw == [0.0, 0.2, 0.9, 1.0, 1.0, 0.0, 1.0]
    assert shaped[0] == pytest.approx(-shaped[1])
    assert shaped[2] < 0 < shaped[3]
    assert shaped[4:] == [0.0, 0.0, 0.0]  # alone in their role, or removed


def critic_sample(own: float, truth: str, *, group: int = 0, **more: Any) -> Sample:
    return Sample(group_index=group, metadata={"role": "check", "truth": truth, "own": own}, reward=own, **more)


def test_critics_are_normalized_per_kind_of_answer(team: ModuleType) -> None:
    """Compares over all questions, as one question may have a single such critic; both kinds weigh the same."""
    given = [critic_sample(own, "wrong", group=group) for group, own in enumerate((1.0, 1.0, 0.0, 0.0))]
    given += [
        critic_sample(1.0, "right"),
        critic_sample(0.0, "right", group=1),
        critic_sample(0.0, "right", remove_sample=True),
    ]
    _, shaped = team.by_role(Namespace(), given)
    wrong, right, left_out = shaped[:4], shaped[4:6], shaped[6]
    assert wrong == pytest.approx([wrong[0], wrong[0], -wrong[0], -wrong[0]])
    assert right == pytest.approx([right[0], -right[0]])
    assert wrong[0] / (6 / 2 / 4) == pytest.approx(3**0.5 / 2, rel=1e-4)  # of the deviation of (1, 1, 0, 0)
    assert right[0] / (6 / 2 / 2) == pytest.approx(2**-0.5, rel=1e-4)
    assert left_out == 0.0


def test_constant_critic_gains_nothing(team: ModuleType) -> None:
    """Nine answers in ten are wrong; critics that always say so lose on the tenth what they gain."""
    given = [critic_sample(own, "wrong", group=group) for group in range(90) for own in (1.0, 0.0)]
    given += [critic_sample(own, "right", group=group) for group in range(90, 100) for own in (1.0, 0.0)]
    _, shaped = team.by_role(Namespace(), given)
    says_wrong = [(one.metadata["truth"] == "wrong") == (one.metadata["own"] == 1.0) for one in given]
    gains = [value for value, said in zip(shaped, says_wrong, strict=True) if said]
    assert abs(sum(gains)) < 0.03 * sum(map(abs, gains))


def test_critic_score_averages_both_kinds_of_answers(team: ModuleType) -> None:
    always_wrong = [critic_sample(1.0, "wrong")] * 9 + [critic_sample(0.0, "right")]
    solvers = [Sample(metadata={"role": "solve", "own": own}) for own in (1.0, 0.0, 0.0, 0.0)]
    judges = [Sample(metadata={"role": "choose", "own": 0.0}, remove_sample=True)]
    assert team.well_done([*always_wrong, *solvers, *judges]) == {"check": 0.5, "solve": 0.25}


def test_demonstrations_cover_every_role_and_exclude_held_out(team: ModuleType, tmp_path: Path) -> None:
    task = sys.modules["task"]
    held_out = task.held_out_questions(10, seed=2)
    shown = task.demonstrations(300, held_out=held_out, seed=2)
    assert {row["messages"][0]["content"] for row in shown} == {"solve", "check", "choose"}
    asked = {" ".join(row["messages"][1]["content"].split()[: task.NUMBERS]) for row in shown}
    assert not asked & set(held_out)
    files = task.write_files(tmp_path, shown, training=20, held_out=held_out, seed=2)
    assert len(set(files.held_out.read_text().splitlines())) == 10
    assert not set(files.held_out.read_text().splitlines()) & set(files.training.read_text().splitlines())
    assert task.label_of("3 9 4 1") == "9"
    assert task.judged_well("right", "5", "5")
    assert task.judged_well("wrong", "4", "5")
    assert not task.judged_well("perhaps", "5", "5")


@pytest.mark.examples
def test_run_improves_the_team_and_its_roles(run_example: Callable[..., Ran]) -> None:
    ran = run_example("multi_agent/run.py", "--seed", "3", "--warm-up-steps", "80", "--steps", "8")
    held_out = ran.series("eval/held-out")
    assert held_out[-1] > held_out[0] + 0.15
    roles = [json.loads(line) for line in (ran.folder / "roles.jsonl").read_text().splitlines()]
    assert len(roles) == 8
    first, last = (
        {role: fmean(row[role] for row in some) for role in ("solve", "check")} for some in (roles[:3], roles[-3:])
    )
    assert last["solve"] > first["solve"] + 0.15
    assert last["check"] > first["check"]
    assert "own work done well: solve" in ran.output
