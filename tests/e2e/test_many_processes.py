"""Two trainers and two engines do what one of each does."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import grpo_flags
from tests.e2e.runs import TRAIN, Done, assert_same_records, comparable, run, seen_samples


def test_two_and_two_train_like_one_and_one(whole_run: tuple[Path, Done], place: Path) -> None:
    processes = ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--num-rollout", "2"]
    done = run([*TRAIN, *grpo_flags(), *processes, "--output-dir", "two"], place)
    assert (done.code, done.err) == (0, "")
    assert {path.name for path in (place / "two/logs").iterdir()} == {
        *("driver.log", "engine-0.log", "engine-1.log", "trainer-0.log", "trainer-1.log")
    }
    ones = {s["index"]: s for s in seen_samples(whole_run[0]) if not s["evaluation"]}
    twos = {s["index"]: s for s in seen_samples(place / "two")}
    assert sorted(twos) == list(range(32))
    assert all(twos[index]["tokens"] == ones[index]["tokens"] for index in twos)
    expected = [r for r in comparable(whole_run[0]) if r["kind"] != "eval" and r["rollout_id"] < 2]
    assert len(expected) == 6
    assert_same_records(comparable(place / "two"), expected, 1e-5)
