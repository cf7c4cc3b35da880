"""A run that is stopped or killed and then resumed equals an uninterrupted run."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.e2e.conftest import eval_flags, grpo_flags
from tests.e2e.runs import TRAIN, Done, assert_same_records, comparable, records, run, started, wait_until

TOLERANCE = 1e-7
DEADLY = """\
import os
import signal

from slime.cluster.process import process_tree


def token_sum(args, sample):
    \"\"\"Kills a trainer at a sample of the second rollout, and at one of the third, once each.\"\"\"
    done = os.path.join(args.output_dir, f"struck-{sample.index}")
    if sample.index in (20, 36) and not sample.metadata.get("evaluation") and not os.path.exists(done):
        open(done, "w").close()
        for pid in process_tree(os.getpid()):
            with open(f"/proc/{pid}/cmdline") as words, open(f"/proc/{pid}/environ") as variables:
                command = words.read()
                is_rank = f"RANK={os.environ['DEADLY_RANK']}" in variables.read().split("\\0")
            if is_rank and "slime.train.worker" in command and "reaper.py" not in command:
                os.kill(pid, signal.SIGKILL)
    return sum(sample.tokens) % 7 / 7
"""


def test_stopped_killed_and_resumed_run_equals_uninterrupted_run(whole_run: tuple[Path, Done], place: Path) -> None:
    whole, _ = whole_run
    command = [*TRAIN, *grpo_flags(), *eval_flags(), "--save", "parts", "--load", "parts", "--save-interval", "1"]

    stopped = run([*command, "--num-rollout", "2"], place)
    assert (stopped.code, stopped.err) == (0, "")
    metrics = place / "parts" / "metrics.jsonl"
    *lines, evaluation = metrics.read_text().splitlines(keepends=True)
    assert '"kind": "eval", "step": 2' in evaluation
    metrics.write_text("".join(lines))  # as after a kill between the checkpoint and its evaluation

    with started([*command, "--num-rollout", "4"], place, HOLD_FROM_ROLLOUT="3", HELD="held-parts") as killed:
        killed.wait_for("step 3/4")
        assert wait_until((place / "held-parts").exists, within_s=240)
        killed.popen.send_signal(signal.SIGKILL)
        assert killed.popen.wait() == -signal.SIGKILL
        assert wait_until(lambda: not killed.processes(), within_s=120), "processes outlived their driver"
    assert any("resuming from parts at step 3" in line for line in killed.lines)

    resumed = run(command_for_sibling_folder(place, [*command, "--num-rollout", "4"]), place / "beside")
    assert (resumed.code, resumed.err) == (0, "")
    assert "resuming from ../parts at step 4" in resumed.out

    assert_same_records(comparable(place / "parts"), comparable(whole), TOLERANCE)
    assert "4, 1 of them since the resume" in resumed.out
    assert (place / "parts" / "reward.png").is_file()

    again = run([*command, "--num-rollout", "4"], place)
    assert (again.code, again.err) == (0, "")
    assert "\nthis run is finished: parts has a checkpoint after step 4, and --num-rollout is 4;" in again.out
    assert "starting" not in again.out
    assert_same_records(comparable(place / "parts"), comparable(whole), TOLERANCE)


def command_for_sibling_folder(place: Path, command: list[str]) -> list[str]:
    """Returns the command for another working folder, or for another machine with the same storage."""
    (place / "beside").mkdir()
    here = {*(path.name for path in place.iterdir()), "parts"}
    return [f"../{word}" if word.split("@")[0].split(":")[0] in here else word for word in command]


def test_run_with_two_trainer_restarts_equals_uninterrupted_run(whole_run: tuple[Path, Done], place: Path) -> None:
    """The trainer dies before the first checkpoint and again after one. The driver process restarts the run."""
    whole, _ = whole_run
    (place / "deadly.py").write_text(DEADLY)
    flags = ["--save", "lost", "--save-interval", "2", "--num-rollout", "4", "--max-restarts", "1"]
    deadly = ["--custom-rm-path", "deadly.py:token_sum"]
    done = run([*TRAIN, *grpo_flags(), *eval_flags(), *flags, *deadly], place, DEADLY_RANK="0")
    assert done.code == 0, done.err
    assert done.err.count("restart 1 of 1 without progress, from the start: trainer-0 ended during") == 1
    assert done.err.count("restart 1 of 1 without progress, from lost: trainer-0 ended during") == 1
    assert "resuming from lost at step 3" in done.out
    assert "4, 2 of them since the resume" in done.out
    assert_same_records(comparable(place / "lost"), comparable(whole), TOLERANCE)
    assert [path.name for path in (place / "lost").glob("metrics*.jsonl")] == ["metrics.jsonl"]
    assert groups_per_rollout(place / "lost") == [(rollout_id, 4) for rollout_id in range(4)]


def groups_per_rollout(run_dir: Path) -> list[tuple[int | None, int]]:
    """Returns (rollout, number of groups it consumed). The rollout of unconsumed groups is None."""
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        return journal.execute("SELECT consumed_by, COUNT(*) FROM groups GROUP BY 1 ORDER BY 1").fetchall()


def test_ppo_run_restarts_after_losing_one_of_two_ranks(place: Path) -> None:
    (place / "deadly.py").write_text(DEADLY)
    flags = [
        *("--save", "ppo", "--save-interval", "1", "--num-rollout", "4", "--max-restarts", "1"),
        *("--advantage-estimator", "ppo", "--actor-num-gpus-per-node", "2", "--async-mode", "one-step"),
        *("--rollout-num-gpus", "1", "--custom-rm-path", "deadly.py:token_sum"),
    ]
    done = run([*TRAIN, *grpo_flags(), *flags], place, DEADLY_RANK="1")
    assert done.code == 0, done.err
    assert done.err.count("trainer-1 ended during") == 2
    rollouts, steps = (records(place / "ppo", kind) for kind in ("rollout", "train"))
    assert [record["step"] for record in rollouts] == [0, 1, 2, 3]
    assert [record["step"] for record in steps] == list(range(8))
    assert all("train/critic-value_loss" in record for record in steps)
    assert groups_per_rollout(place / "ppo") == [(rollout_id, 4) for rollout_id in range(4)]
    for folder in (place / "ppo", place / "ppo/critic"):
        assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


def test_journal_keeps_the_buffers_of_all_kept_checkpoints(place: Path) -> None:
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
