"""Whole runs in which an engine is killed or stopped, during generation or a weight update."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.cluster.process import process_tree
from slime.data.sample import Sample
from slime.errors import RunFailed
from tests.rows import long
from tests.tiny_models import make_model_folder

ROLLOUTS, PROMPTS, SAMPLES = 3, 8, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("faults") / "model")


def engine_pids() -> list[int]:
    """Returns the pids of the engines of the run in this process, ordered by port."""
    found = []
    for pid in process_tree(os.getpid()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"slime.engine.embedded" in words and b"-I" not in words:
            found.append((int(words[words.index(b"--port") + 1]), pid))
    return [pid for _, pid in sorted(found)]


class StrikingReward:
    """Scores by index. At sample `at` it sends a signal to one engine, whose other requests are in flight."""

    def __init__(self, at: int, how: int) -> None:
        self.at, self.how, self.struck = at, how, 0
        self.seen: list[tuple[int, int]] = []

    def __call__(self, args: Any, sample: Sample) -> float:
        assert sample.index is not None
        self.seen.append((sample.index, sample.response_length))
        if sample.index == self.at and not self.struck:
            self.struck += 1
            os.kill(engine_pids()[0], self.how)
        return float(sample.index % 2)


def train(folder: Path, out: Path, reward: Any, **flags: Any) -> Any:
    prompts = out / "prompts.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    prompts.write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(64)))
    settings: dict[str, Any] = {
        "hf_checkpoint": str(folder), "prompt_data": str(prompts), "num_rollout": ROLLOUTS, "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": SAMPLES, "rollout_max_response_len": 120, "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 8192, "lr": 1e-3, "rollout_num_gpus": 2, "use_fault_tolerance": True,
        "rollout_health_check_interval": 0.3, "rollout_health_check_timeout": 120.0, "progress": "none",
        "output_dir": str(out / "run"),
    }  # fmt: skip
    return slime.run(reward=reward, **(settings | flags))


@pytest.mark.parametrize(
    ("how", "flags"),
    [
        (signal.SIGKILL, {}),
        long(signal.SIGSTOP, {"rollout_health_check_timeout": 12.0}),
        (signal.SIGKILL, {"update_weight_transport": "nccl"}),
        (signal.SIGKILL, {"lora_rank": 4, "lora_sync": "adapter", "check_weight_update_equal": True}),
    ],
    ids=["killed", "stopped", "killed, weights by broadcast", "killed, an adapter for its folder's weights"],
)
def test_run_survives_a_killed_or_stopped_engine(how: int, flags: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    reward = StrikingReward(40, how)
    result = train(folder, tmp_path, reward, **flags)
    assert reward.struck == 1
    assert [metrics["rollout/failed/count"] for metrics in result.metrics] == [0.0] * ROLLOUTS
    assert sorted(index for index, _ in reward.seen) == list(
        range(ROLLOUTS * PROMPTS * SAMPLES)
    )  # no sample lost or repeated
    assert all(metrics["rollout/raw_reward"] == 0.5 for metrics in result.metrics)
    gaps = [metrics["train/train_rollout_logprob_abs_diff_max"] for metrics in result.metrics]
    assert max(gaps) < 1e-3  # also on the restarted engine and in resumed responses
    log = (tmp_path / "run/logs/driver.log").read_text()
    restarts = log.count("is restarted")
    assert restarts == 1 or (how == signal.SIGSTOP and restarts > 1)  # a slow engine may also be restarted
    assert log.count("is back") == restarts


def test_engine_killed_before_an_update_restarts_with_new_weights(folder: Path, tmp_path: Path) -> None:
    reward = StrikingReward(ROLLOUTS * PROMPTS * SAMPLES, signal.SIGKILL)  # out of range: it sends no signal itself
    struck, one_at_a_time = [], threading.Lock()

    def last_of_first(args: Any, sample: Sample) -> float:
        with one_at_a_time:
            if len(reward.seen) == PROMPTS * SAMPLES - 1:  # the last sample of the rollout: training follows
                os.kill(engine_pids()[1], signal.SIGKILL)
                struck.append(sample.index)
            return reward(args, sample)

    result = train(folder, tmp_path, last_of_first, rollout_health_check_interval=60.0)
    assert len(struck) == 1
    gaps = [metrics["train/train_rollout_logprob_abs_diff_max"] for metrics in result.metrics]
    assert max(gaps) < 1e-3
    assert (tmp_path / "run/logs/driver.log").read_text().count("is restarted") == 1


def test_too_many_engine_restarts_end_the_run(folder: Path, tmp_path: Path) -> None:
    def murderous(args: Any, sample: Sample) -> float:
        for pid in engine_pids()[:1]:
            os.kill(pid, signal.SIGKILL)
        return 0.0

    with pytest.raises(RunFailed, match=r"restarts \(--engine-max-restarts\)"):
        train(folder, tmp_path, murderous, engine_max_restarts=1)


KILLER = """\
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.e2e.test_fault_tolerance import engine_pids


def post_write(args, version_dir, rollout_engines):
    marker = os.path.join(args.output_dir, "struck")
    if version_dir.endswith("1") and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(engine_pids()[1], signal.SIGKILL)
"""


def test_engine_killed_during_an_update_gets_it_after_restart(folder: Path, tmp_path: Path) -> None:
    hook = tmp_path / "killer.py"
    hook.write_text(KILLER.format(root=str(Path(__file__).parents[2])))
    flags = {"update_weight_transport": "disk", "custom_update_weight_post_write_path": f"{hook}:post_write"}
    result = train(folder, tmp_path, lambda args, sample: float(sample.index % 2), **flags)
    assert (tmp_path / "run/struck").exists()
    assert len(result.metrics) == ROLLOUTS
    assert all(metrics["rollout/failed/count"] == 0.0 for metrics in result.metrics)
    assert max(metrics["train/train_rollout_logprob_abs_diff_max"] for metrics in result.metrics) < 1e-3
    log = (tmp_path / "run/logs/driver.log").read_text()
    assert log.count("publishing version 1 again") == 1
    assert log.count("is restarted") == 1
