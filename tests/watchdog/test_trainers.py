"""Trainer ranks that die or stop while others wait in a collective: the error names the right rank."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.config import Config, derive
from slime.train.processes import TrainerDied, TrainerTimeout
from slime.train.trainer_group import TrainerGroup
from tests.e2e.runs import wait_until
from tests.tiny_models import make_model_folder
from tests.train.tiny_training import make_samples
from tests.train.waiting_ranks import run_out_of_time, when_rank_0_waits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture
def two_ranks(model: Path, tmp_path: Path) -> Iterator[TrainerGroup]:
    config = derive(
        Config(
            hf_checkpoint=str(model), rollout_batch_size=3, n_samples_per_prompt=3, global_batch_size=9,
            num_steps_per_rollout=1, num_rollout=3, lr=1e-3, micro_batch_size=2, dtype="float32",
            actor_num_gpus_per_node=2, distributed_timeout_minutes=2,
        )
    )  # fmt: skip
    with TrainerGroup(config, device="cpu", run_dir=tmp_path) as group:
        group.start()
        yield group


def child(group: TrainerGroup, index: int) -> int:
    pid = group.processes.ranks[index].process.child_pid()
    assert pid is not None
    return pid


def test_rank_killed_during_a_collective_is_named(two_ranks: TrainerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.train.processes.DEATH_PATIENCE_S", 120.0)
    victim, process = child(two_ranks, 1), two_ranks.processes.ranks[1].process
    ended = process.wait
    monkeypatch.setattr(process, "wait", lambda timeout_s=None: ended(120.0))
    os.kill(victim, signal.SIGSTOP)  # ensures that rank 0 waits for it when it dies
    killing = when_rank_0_waits(two_ranks, lambda: os.kill(victim, signal.SIGKILL))
    with pytest.raises(TrainerDied, match=r"^trainer-1 ended during train \(exit code -9\)"):
        two_ranks.train(0, make_samples(3, 3))
    killing.join()
    two_ranks.stop()
    assert wait_until(lambda: not Path(f"/proc/{victim}").exists(), 120)


def test_timeout_names_the_stopped_rank_and_shows_the_waiting_stack(
    two_ranks: TrainerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.cluster.watchdog.stacks.ANSWER_S", 30.0)
    monkeypatch.setattr("slime.cluster.watchdog.stacks._SETTLED_S", 1.0)
    monkeypatch.setattr("slime.cluster.watchdog.timeouts._REPORT_S", 120.0)
    pids = [child(two_ranks, index) for index in (0, 1)]
    os.kill(pids[1], signal.SIGSTOP)
    running_out = when_rank_0_waits(two_ranks, run_out_of_time)
    with pytest.raises(TrainerTimeout) as caught:
        two_ranks.train(0, make_samples(3, 3))
    running_out.join()
    first, *rest = str(caught.value).splitlines()
    assert re.match(
        r"driver waited [\d.]+ s for trainer-0, trainer-1 to finish train, the last [\d.]+ s without progress "
        r"\(--distributed-timeout-minutes\): trainer-0 \(pid \d+\) is .*, [\d.]+ s ago at preparing the samples; ",
        first,
    )
    assert first.endswith(f"; trainer-1 (pid {pids[1]}) is stopped (SIGSTOP)")
    text = "\n".join(rest)
    assert "driver waits for trainer-0, trainer-1 to finish train: " in text
    assert f"trainer-1:\n  trainer-1 (pid {pids[1]}) is stopped (SIGSTOP)" in text
    waiter = text.split("trainer-0:\n")[1].split("trainer-1:\n")[0]
    assert "slime/train/worker.py" in waiter
    assert "in serve" in waiter
    two_ranks.stop()
    assert wait_until(lambda: all(not Path(f"/proc/{pid}").exists() for pid in pids), 120)
