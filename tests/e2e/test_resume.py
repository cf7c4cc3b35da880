"""A run that was stopped, or killed, and started again is the run that was never interrupted."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.e2e.conftest import eval_flags, grpo_flags
from tests.e2e.runs import TRAIN, Done, assert_same_records, comparable, run, started, wait_until

TOLERANCE = 1e-7


def test_stopped_killed_and_resumed_equals_uninterrupted(whole_run: tuple[Path, Done], place: Path) -> None:
    whole, _ = whole_run
    command = [*TRAIN, *grpo_flags(), *eval_flags(), "--save", "parts", "--load", "parts", "--save-interval", "1"]

    stopped = run([*command, "--num-rollout", "2"], place)
    assert (stopped.code, stopped.err) == (0, "")
    metrics = place / "parts" / "metrics.jsonl"
    *lines, evaluation = metrics.read_text().splitlines(keepends=True)
    assert '"kind": "eval", "step": 2' in evaluation
    metrics.write_text("".join(lines))  # as if it had been killed between the checkpoint and the evaluation after it

    with started([*command, "--num-rollout", "4"], place) as killed:
        killed.wait_for("step 3/4")
        killed.popen.send_signal(signal.SIGKILL)
        assert killed.popen.wait() == -signal.SIGKILL
        assert wait_until(lambda: not killed.processes(), within_s=10), "processes outlived their driver"
    assert any("resuming from parts at step 3" in line for line in killed.lines)

    resumed = run([*command, "--num-rollout", "4"], place)
    assert (resumed.code, resumed.err) == (0, "")
    assert "resuming from parts at step 4" in resumed.out

    assert_same_records(comparable(place / "parts"), comparable(whole), TOLERANCE)
    assert "4, 1 of them since the resume" in resumed.out
    assert (place / "parts" / "reward.png").is_file()

    again = run([*command, "--num-rollout", "4"], place)
    assert (again.code, again.err) == (0, "")
    assert "\nthis run is finished: parts has a checkpoint after step 4, and --num-rollout is 4;" in again.out
    assert "starting" not in again.out
    assert_same_records(comparable(place / "parts"), comparable(whole), TOLERANCE)


def test_the_buffer_of_each_checkpoint_that_is_there_stays_in_the_journal(place: Path) -> None:
    flags = [
        *("--over-sampling-batch-size", "8", "--partial-rollout", "--keep-samples-mb", "0"),
        *("--save", "buffered", "--save-interval", "1", "--num-rollout", "3", "--ckpt-keep", "2"),
    ]
    done = run([*TRAIN, *grpo_flags(), *flags], place)
    assert (done.code, done.err) == (0, "")
    with closing(sqlite3.connect(place / "buffered/journal.sqlite")) as journal:
        there = {row_id for (row_id,) in journal.execute("SELECT id FROM samples")}
        assert journal.execute("SELECT DISTINCT checkpoint FROM referred ORDER BY 1").fetchall() == [(1,), (2,)]
    for rollout_id in (1, 2):
        groups = json.loads((place / f"buffered/rollout/data_state_{rollout_id}.json").read_text())["buffer"]
        rows = {sample["recorded"]["id"] for group in groups for sample in group}
        assert len(groups) == 4
        assert len(rows) == 16
        assert rows <= there
