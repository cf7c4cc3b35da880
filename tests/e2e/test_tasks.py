"""A run over several datasets that is killed and resumed equals an uninterrupted run."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from tests.e2e.conftest import grpo_flags
from tests.e2e.runs import TRAIN, assert_same_records, comparable, records, run, started, wait_until

TOLERANCE = 1e-7
REWARD = """

async def partly_random(args, sample):
    \"\"\"Where it is told to, it never comes to an end in the fourth rollout.\"\"\"
    if "TASKS_HOLD" in os.environ and sample.index in range(48, 64):
        open(os.environ["TASKS_HOLD"], "w").close()
        await asyncio.Event().wait()
    return sum(sample.tokens) % 5 / 5
"""


def test_killed_run_over_three_datasets_resumes_identically(place: Path) -> None:
    """The shortest dataset is in its second epoch when the run is killed."""
    datasets = [
        {"name": "low", "path": "sums.jsonl@[0:3]", "weight": 2, "max_response_len": 6},
        {"name": "middle", "path": "sums.jsonl@[3:7]", "custom_rm_path": "plugins.py:partly_random"},
        {"name": "high", "path": "sums.jsonl@[7:12]"},
    ]
    (place / "tasks.json").write_text(
        json.dumps({"train": {"datasets": datasets}, "eval": {"datasets": datasets[1:2]}})
    )
    plugins = place / "plugins.py"
    plugins.write_text(f"import asyncio\nimport os\n{plugins.read_text()}{REWARD}")
    flags = grpo_flags()
    at = flags.index("--prompt-data")
    flags[at : at + 2] = ["--prompt-config", "tasks.json"]
    command = [*TRAIN, *flags, "--eval-config", "tasks.json", "--eval-interval", "2", "--num-rollout", "5"]
    saved = ["--save-interval", "2", "--keep-samples"]

    whole = run([*command, *saved, "--save", "tasks-whole"], place)
    assert (whole.code, whole.err) == (0, "")
    rollouts = records(place / "tasks-whole", "rollout")
    shares = [[record[f"rollout/{name}/share"] for name in ("low", "middle", "high")] for record in rollouts]
    assert shares == [[0.5, 0.25, 0.25]] * 5
    assert all(f"rollout/{name}/raw_reward" in record for name in ("low", "middle", "high") for record in rollouts)
    assert "eval middle" in whole.out

    parts = ["--save", "tasks-parts", "--load", "tasks-parts"]
    with started([*command, *saved, *parts], place, TASKS_HOLD="held") as killed:
        assert wait_until((place / "held").exists, within_s=120)
        killed.popen.send_signal(signal.SIGKILL)
        assert killed.popen.wait() == -signal.SIGKILL
        assert wait_until(lambda: not killed.processes(), within_s=120), "processes outlived their driver"
    resumed = run([*command, *saved, *parts], place)
    assert (resumed.code, resumed.err) == (0, "")
    assert "resuming from tasks-parts at step 3" in resumed.out
    assert_same_records(comparable(place / "tasks-parts"), comparable(place / "tasks-whole"), TOLERANCE)
    assert prompt_counts(place / "tasks-parts") == prompt_counts(place / "tasks-whole")


def prompt_counts(run_dir: Path) -> Counter[tuple[int, str]]:
    """Returns the count of each prompt in each batch."""
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        rows = journal.execute(
            "SELECT consumed_by, samples.prompt FROM samples JOIN groups ON groups.id = samples.group_id"
        )
        return Counter(rows.fetchall())
