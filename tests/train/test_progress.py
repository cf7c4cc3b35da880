"""Tests the deadline of trainer calls: only progress reports of the call renew it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.process import ChildProcess
from slime.cluster.rpc.channel import Channel, channel_pair
from slime.cluster.watchdog import registry as board_module
from slime.cluster.watchdog.registry import Wait, wait_registry
from slime.config import Config
from slime.train import worker
from slime.train.checkpoints.errors import NotWritten
from slime.train.processes import Rank, TrainerTimeout
from slime.train.timers import RankProgress
from slime.train.trainer_group import TrainerGroup
from slime.train.verbs import verb
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

DEADLINE_S = 600.0


def test_progress_reports_count_and_total() -> None:
    told: list[str] = []
    progress = RankProgress(told.append, between_s=0.0)
    progress.begin("loading the policy")
    assert list(progress.over("ab", "tensor", 2)) == ["a", "b"]
    progress.begin("bytes")
    progress.tick(7)
    assert told == ["loading the policy", "tensor 0 of 2", "tensor 1 of 2", "tensor 2 of 2", "bytes", "bytes 7"]


def test_progress_reports_are_throttled_within_a_call() -> None:
    told: list[str] = []
    progress = RankProgress(told.append, between_s=3600.0)
    for _ in progress.over(range(1000), "tensor", 1000):
        pass
    assert told == ["tensor 0 of 1000"]
    progress.restart()
    progress.tick()
    assert told[1:] == ["tensor 1001 of 1000"]


# driver side, with a clock that the test advances


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class FakeRanks:
    """A trainer group whose rank ends of the channels the test controls; calls to the group run in a thread."""

    def __init__(self, tmp_path: Path, clock: Clock, count: int) -> None:
        self.clock = clock
        config = Config(rollout_batch_size=1, num_rollout=1, actor_num_gpus_per_node=count)
        self.group = TrainerGroup(config, device="cpu", run_dir=tmp_path)
        assert self.group.processes.deadline_s == DEADLINE_S
        self.ends: list[Channel] = []
        for index in range(count):
            ours, theirs = channel_pair()
            process = ChildProcess(f"played-{index}", ["true"], log_path=tmp_path / "log")
            self.group.processes.ranks.append(Rank(process, ours))
            self.ends.append(Channel(theirs))
        self._pool = ThreadPoolExecutor(1)

    def call(self, method: str) -> Future[Any]:
        answer = self._pool.submit(self.group.call, method)
        for end in self.ends:
            assert end.recv(240)["method"] == method
        return answer

    def wait(self) -> Wait:
        (found,) = [wait for wait in wait_registry.waits() if wait.why.startswith("to finish")]
        return found

    def report(self, index: int, text: str, *, request: int) -> None:
        self.ends[index].send({"id": request, "progress": text})

    def answer(self, index: int, result: Any, *, request: int) -> None:
        self.ends[index].send({"id": request, "ok": True, "result": result})

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self._pool.shutdown()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(board_module, "time", clock)
    return clock


@contextmanager
def fake_ranks(tmp_path: Path, clock: Clock, count: int = 1) -> Iterator[FakeRanks]:
    ranks = FakeRanks(tmp_path, clock, count)
    try:
        yield ranks
    finally:
        ranks.close()


def until(condition: Any) -> None:
    """Poll until a condition that another thread makes true."""
    patience = threading.Event()
    for _ in range(48000):
        if condition():
            return
        patience.wait(0.005)
    raise AssertionError("it did not come")


def test_progress_report_renews_the_deadline(tmp_path: Path, clock: Clock) -> None:
    with fake_ranks(tmp_path, clock) as ranks:
        answer = ranks.call("train")
        for done in range(1, 6):
            clock.now += 0.9 * DEADLINE_S
            ranks.report(0, f"update: micro-batch {done} of 5", request=1)
            until(lambda: ranks.wait().deadline == clock.now + DEADLINE_S)
            assert ranks.group.doing() == (f"update: micro-batch {done} of 5", True)
        assert ranks.wait().sentence().endswith(", the last 0 s without progress (--distributed-timeout-minutes)")
        ranks.answer(0, "done", request=1)
        assert answer.result(240) == ["done"]
    assert ranks.group.doing() is None


def test_call_times_out_without_progress_reports(tmp_path: Path, clock: Clock) -> None:
    with fake_ranks(tmp_path, clock) as ranks:
        answer = ranks.call("save")
        ranks.report(0, "writing a checkpoint: tensor 3", request=1)
        until(lambda: ranks.wait().renewed is not None)
        clock.now += DEADLINE_S
        with pytest.raises(TrainerTimeout, match=r"waited 600 s for trainer-0 to finish save, the last 600 s without"):
            answer.result(240)
        assert not ranks.group.is_usable


def test_only_pending_ranks_of_the_call_renew_the_deadline(tmp_path: Path, clock: Clock) -> None:
    with fake_ranks(tmp_path, clock, count=2) as ranks:
        answer = ranks.call("train")
        ranks.answer(0, "done", request=1)
        until(lambda: ranks.wait().whom == "trainer-1")
        ranks.report(0, "something else", request=1)  # from a rank that has answered
        ranks.report(1, "what came late", request=0)  # for the previous call
        ranks.report(1, "update: micro-batch 1 of 2", request=1)
        until(lambda: ranks.group.doing() is not None)
        assert ranks.group.doing() == ("update: micro-batch 1 of 2", True)
        clock.now += DEADLINE_S
        with pytest.raises(TrainerTimeout, match="for trainer-1 to finish train"):
            answer.result(240)


# rank side


class ReportingTrainer:
    """Reports progress in each verb, and keeps how its ranks were joined."""

    made: ReportingTrainer

    def __init__(self, config: Config, device: str, progress: RankProgress, *, names: dict[str, str]) -> None:
        ReportingTrainer.made = self
        self.progress = progress
        self.sender = SimpleNamespace(shared=object())

    def init(self, ranks: dict[str, Any]) -> str:
        self.ranks = ranks
        return "ready"

    def awake(self, needs: str) -> AbstractContextManager[None]:
        return nullcontext()

    @verb()
    def save(self) -> str:
        self.progress.begin("save", 2)
        return "done"

    @verb("nothing")
    def train(self) -> None:
        self.progress.begin("train", 2)
        raise NotWritten("no space")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """The driver's end of a channel to a worker whose trainer is a `ReportingTrainer`."""
    monkeypatch.setattr(worker, "Trainer", ReportingTrainer)
    monkeypatch.setattr(worker, "join_ranks", lambda device, **how: how)
    driver, child = channel_pair()
    serving = threading.Thread(target=worker.serve, args=(Channel(child),), daemon=True)
    serving.start()
    config = Config(rollout_batch_size=1, num_rollout=1, distributed_timeout_minutes=60)
    params = {"config": config.to_dict(), "device": "cpu", "meeting": {}, "names": {}}
    with driver:
        driver.send({"id": 5, "method": "save", "params": {}})
        early = driver.recv(240)
        assert (early["id"], early["ok"]) == (5, False)
        assert "save was called before init" in early["error"]["message"]
        driver.send({"id": 6, "method": "init", "params": params})
        assert driver.recv(240) == {"id": 6, "progress": "joining the other ranks"}
        assert driver.recv(240) == {"id": 6, "ok": True, "result": "ready"}
        yield driver
        driver.send({"id": 9, "method": "stop", "params": {}})
        assert driver.recv(240) == {"id": 9, "ok": True, "result": None}
    serving.join(240)


def test_worker_sends_progress_only_during_a_call(served: Channel) -> None:
    for number in (7, 8):
        served.send({"id": number, "method": "save", "params": {}})
        assert served.recv(240) == {"id": number, "progress": "save 0 of 2"}
        assert served.recv(240) == {"id": number, "ok": True, "result": "done"}
        ReportingTrainer.made.progress.restart()
        ReportingTrainer.made.progress.tick()  # as a background thread does between calls


def test_worker_answers_a_failed_verb_with_its_error(served: Channel) -> None:
    served.send({"id": 7, "method": "train", "params": {}})
    assert served.recv(240) == {"id": 7, "progress": "train 0 of 2"}
    reply = served.recv(240)
    assert (reply["id"], reply["ok"], "result" in reply) == (7, False, False)
    assert reply["error"].pop("traceback").startswith("Traceback")
    assert reply["error"] == {"type": "NotWritten", "message": "no space", "user_error": False, "not_written": True}


def test_collective_timeout_exceeds_the_call_deadline(served: Channel) -> None:
    """Otherwise a rank blocked on a working rank would fail, although progress reports renew the driver's deadline."""
    assert ReportingTrainer.made.ranks["timeout_minutes"] > 60 * 24


def test_training_saving_and_exporting_report_progress(model_folder: Any, tmp_path: Path) -> None:
    told: list[str] = []
    config = config_for(
        model_folder("qwen3"), tmp_path, use_kl_loss=True, kl_loss_coef=0.1, advantage_estimator="ppo",
        save=str(tmp_path / "ckpt"), num_steps_per_rollout=1,
    )  # fmt: skip
    run = InProcess(config, RankProgress(told.append, between_s=0.0))

    def reports() -> list[str]:
        found, told[:] = list(told), []
        return found

    def counted(doing: str, total: int) -> list[str]:
        return [f"{doing} {done} of {total}" for done in range(total + 1)]

    begun = reports()
    assert [line for line in begun if "reading" not in line] == [
        "loading the critic",
        "loading the policy",
        "loading ref",
    ]
    assert begun[-1] == "reading weights: tensor {0} of {0}".format(len(run.weights))
    run.train(0, make_samples(3, 3))
    stages = ["ref", "policy", "update", "update"]
    assert reports() == ["preparing the samples"] + [
        line for stage in stages for line in counted(f"{stage}: micro-batch", 5)
    ]
    run.trainer.sender.export_weights(str(tmp_path / "export"), 1)
    assert reports() == counted("writing weights: bucket", len(list((tmp_path / "export").iterdir())))
    run.trainer.save_hf(str(tmp_path / "hf"))
    assert reports() == counted("writing a Hugging Face folder: bucket", 1)
    run.trainer.save(0)
    assert run.trainer.critic is not None
    both = [run.trainer.critic.backend, run.trainer.actor.backend]
    count = sum(len(list(backend.state_parts(["model", "optim"]))) for backend in both)
    assert count > 8 * len(run.weights)  # weights, two moments and a step count of each
    assert reports() == [
        "writing a checkpoint: tensor",
        *(f"writing a checkpoint: tensor {n + 1}" for n in range(count)),
    ]
