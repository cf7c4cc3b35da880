"""On-policy distillation with a served teacher, and dynamic sampling in a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from slime.rollout.base_types import leaves
from slime.rollout.debug_data import read_dump
from tests.e2e.conftest import grpo_flags
from tests.e2e.runs import TRAIN, records, run
from tests.tiny_models import make_model_folder

TWO_SCORES = """\
def score(args, sample):
    return float(sample.group_index % 2 == 0 and sample.index % 4 == 1)
"""


def without_reward(flags: list[str]) -> list[str]:
    return [word for i, word in enumerate(flags) if "--custom-rm-path" not in (word, flags[i - 1])]


def gap_to_teacher(dump: Path) -> float:
    """Returns the mean of log p_student - log p_teacher over sampled tokens, an estimate of the reverse KL."""
    return fmean(
        mine - theirs
        for sample in leaves(read_dump(dump))
        for mine, theirs in zip(sample.rollout_log_probs, sample.teacher_log_probs, strict=True)
    )


def test_student_learns_from_a_served_teacher_without_rewards(place: Path) -> None:
    make_model_folder(place / "sage", seed=11)
    flags = [
        *without_reward(grpo_flags()),
        *("--num-rollout", "6", "--rollout-temperature", "1", "--lr", "5e-3", "--global-batch-size", "16"),
        *("--use-opd", "--opd-type", "engine", "--opd-teacher-load", "sage", "--opd-kl-coef", "1.0"),
        *("--save-debug-rollout-data", "opd/{rollout_id}.jsonl", "--output-dir", "opd"),
    ]
    done = run([*TRAIN, *flags], place)
    assert (done.code, done.err) == (0, "")
    found = records(place / "opd", "rollout")
    assert [record["rollout/raw_reward"] for record in found] == [0.0] * 6
    gaps = [gap_to_teacher(place / f"opd/{rollout_id}.jsonl") for rollout_id in range(6)]
    assert fmean(gaps[-2:]) < 0.9 * fmean(gaps[:2])


def test_teacher_log_probs_agree_between_engine_and_trainer(place: Path) -> None:
    """Both runs sample the same tokens in the first step, so the log-probs of the larger teacher must agree."""
    make_model_folder(place / "larger", seed=11, intermediate_size=128)
    computed = {}
    for where in ("engine", "trainer"):
        flags = [
            *without_reward(grpo_flags()),
            *("--num-rollout", "1", "--rollout-temperature", "1"),
            *("--use-opd", "--opd-type", where, "--opd-teacher-load", "larger"),
            *("--save-debug-train-data", f"{where}/{{rollout_id}}.jsonl", "--output-dir", where),
        ]
        done = run([*TRAIN, *flags], place)
        assert (done.code, done.err) == (0, "")
        _, *computed[where] = map(json.loads, (place / where / "0.jsonl").read_text().splitlines())
    assert len(computed["engine"]) == len(computed["trainer"]) == 16
    for one, other in zip(computed["engine"], computed["trainer"], strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["teacher_log_probs"] == pytest.approx(other["teacher_log_probs"], abs=2e-4)
        assert one["opd_reverse_kl"] == pytest.approx(other["opd_reverse_kl"], abs=2e-4)
        assert one["advantages"] == pytest.approx([-kl for kl in one["opd_reverse_kl"]])
    assert max(abs(kl) for row in computed["engine"] for kl in row["opd_reverse_kl"]) > 0.05, "it is another model"


def test_dapo_drops_groups_with_equal_rewards(place: Path) -> None:
    (place / "scores.py").write_text(TWO_SCORES)
    flags = [word if word != "grpo" else "dapo" for word in grpo_flags()]
    flags += ["--custom-rm-path", "scores.py:score", "--num-rollout", "2", "--output-dir", "dapo", "--save", "dapo"]
    flags += ["--save-debug-rollout-data", "dapo/{rollout_id}.jsonl"]
    done = run([*TRAIN, *flags], place)
    assert (done.code, done.err) == (0, "")
    for rollout_id, record in enumerate(records(place / "dapo", "rollout")):
        assert record["rollout/raw_reward"] == 0.25
        assert record["rollout/zero_std/count"] == 0
        assert record["rollout/dynamic_filter/drop_zero_std_0.0"] >= 2
        groups = {sample.group_index for sample in leaves(read_dump(place / f"dapo/{rollout_id}.jsonl"))}
        assert len(groups) == 4
        assert all(group % 2 == 0 for group in groups)
