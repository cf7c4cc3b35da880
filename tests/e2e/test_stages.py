"""A staged run with an observing data source, killed in its second stage, ends like an uninterrupted one."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from tests.e2e.conftest import grpo_flags
from tests.e2e.runs import Done, assert_same_records, comparable, run, started, wait_until

TOLERANCE = 1e-7
SOURCE = """\
from slime.utils.types import Sample


class DataSource:
    \"\"\"Counts on from the rewards it has seen: whatever is lost or seen twice changes every later prompt.\"\"\"

    def __init__(self, args):
        self.made, self.seen, self.total = 0, [], 0.0

    def get_samples(self, num_samples):
        self.made += num_samples
        return [Sample(prompt=f"{self.made + place} {self.total:.4f}?") for place in range(num_samples)]

    def observe_samples(self, rollout_id, groups):
        self.seen.append([rollout_id, len(groups)])
        self.total += sum(sample.reward for group in groups for sample in group)

    def state_dict(self):
        return {"made": self.made, "seen": self.seen, "total": self.total}

    def load_state_dict(self, state):
        self.made, self.seen, self.total = state["made"], state["seen"], state["total"]
"""
STAGES = """\
data_source_path: observing.py:DataSource
save_interval: 2
stages:
  - {name: small, num_rollout: 2, n_samples_per_prompt: 2, global_batch_size: 4}
  - {name: large, num_rollout: 3, n_samples_per_prompt: 4, global_batch_size: 8, rollout_max_response_len: 10}
"""


def command(out: str) -> list[str]:
    words = grpo_flags()
    for flag in ("--n-samples-per-prompt", "--global-batch-size", "--rollout-max-response-len", "--prompt-data"):
        place = words.index(flag)
        del words[place : place + 2]
    for flag in ("--apply-chat-template", "--rollout-shuffle"):
        words.remove(flag)
    return [sys.executable, "-m", "slime.cli", "stages", "stages.yaml", *words, "--output-dir", out]


def source_state(folder: Path) -> dict[str, object]:
    state = json.loads((folder / "2-large" / "rollout" / "data_state_4.json").read_text())
    return dict(state["source"])


def test_staged_run_killed_in_stage_2_resumes_identically(place: Path) -> None:
    (place / "observing.py").write_text(SOURCE)
    (place / "stages.yaml").write_text(STAGES)
    whole: Done = run(command("unbroken"), place)
    assert (whole.code, whole.err) == (0, "")
    assert source_state(place / "unbroken")["seen"] == [[number, 4] for number in range(5)]

    with started(command("broken"), place, HOLD_FROM_ROLLOUT="3", HELD="held-stages") as killed:
        killed.wait_for("stage 2 of 2: large")
        killed.wait_for("step 3/5")
        assert wait_until((place / "held-stages").exists, within_s=240)
        killed.popen.send_signal(signal.SIGKILL)
        assert killed.popen.wait() == -signal.SIGKILL
        assert wait_until(lambda: not killed.processes(), within_s=120), "processes outlived their driver"
    again = run(command("broken"), place)
    assert (again.code, again.err) == (0, "")
    assert "this run is finished" in again.out  # the first stage
    assert source_state(place / "broken") == source_state(place / "unbroken")
    for stage in ("1-small", "2-large"):
        ours, theirs = (comparable(place / name / stage) for name in ("broken", "unbroken"))
        assert_same_records(ours, theirs, TOLERANCE)
