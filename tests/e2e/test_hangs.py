"""Whole runs in which an engine, a reward function or a trainer hangs or dies: the error names it and the flag."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.cluster.process import process_tree
from slime.cluster.watchdog.timeouts import GraphReports
from slime.data.sample import Sample
from slime.errors import RunFailed
from slime.observability.progress import Progress, Source
from slime.train.processes import RankProcesses
from slime.train.trainer_group import TrainerGroup
from tests.e2e.test_fault_tolerance import engine_pids
from tests.patience import with_more_time
from tests.tiny_models import make_model_folder
from tests.train.waiting_ranks import run_out_of_time, when_rank_0_waits

PROMPTS, SAMPLES = 2, 4
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def _own_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets the log limit of one wait-for graph per minute and process, which earlier tests may have used."""
    monkeypatch.setattr("slime.cluster.watchdog.timeouts.reports", GraphReports())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("hangs") / "model")


def train(folder: Path, out: Path, reward: Any, **flags: Any) -> Any:
    out.mkdir(exist_ok=True)
    prompts = out / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(64)))
    settings: dict[str, Any] = {
        "hf_checkpoint": str(folder), "prompt_data": str(prompts), "num_rollout": 2, "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": SAMPLES, "rollout_max_response_len": 16, "lr": 1e-3, "rollout_num_gpus": 1,
        "progress": "none", "output_dir": str(out / "run"),
    }  # fmt: skip
    return slime.run(reward=reward, **(settings | flags))


def by_index(args: Any, sample: Sample) -> float:
    return float((sample.index or 0) % 2)


def trainer_pid(rank: int) -> int:
    """Returns the pid of one trainer rank of the run in this process."""
    for pid in process_tree(os.getpid()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"slime.train.worker" in words and b"-I" not in words and f"RANK={rank}".encode() in environment:
            return pid
    raise AssertionError(f"there is no trainer-{rank}")


def driver_log(out: Path) -> str:
    return (out / "run/logs/driver.log").read_text()


# engines

STOPPER = f"""\
import os, signal, sys
sys.path.insert(0, {ROOT!r})
from slime.rollout.sglang_rollout import generate
from tests.e2e.test_fault_tolerance import engine_pids


async def stop_then_generate(args, sample, sampling_params):
    os.kill(engine_pids()[0], signal.SIGSTOP)
    return await generate(args, sample, sampling_params)
"""


def test_hung_engine_error_names_engine_call_and_flag(folder: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "stopper.py"
    plugin.write_text(STOPPER)

    def check(seconds: float) -> None:
        out = tmp_path / f"{seconds:g}"
        flags = {"custom_generate_function_path": f"{plugin}:stop_then_generate", "engine_request_timeout": seconds}
        expected = (
            rf"rollout 0: all {PROMPTS * SAMPLES} samples failed; the first one: engine: EngineTimeout: "
            rf"engine http://\S+: /generate did not finish within its deadline of {seconds:g} s "
            r"\(--engine-request-timeout\): engine-0 \(pid \d+\) is stopped \(SIGSTOP\)"
        )
        with pytest.raises(RunFailed, match=expected):
            train(folder, out, by_index, **flags)
        line = rf"for engine http://\S+ to answer /generate: longest \d+\.\d s of {seconds:g} s"
        assert_graph(driver_log(out), line)

    with_more_time(check, 4.0, 40.0)


def test_engine_hung_before_a_weight_update_is_named(folder: Path, tmp_path: Path) -> None:
    def check(seconds: float) -> None:
        seen: list[int] = []

        def strikes_last(args: Any, sample: Sample) -> float:
            seen.append(sample.index or 0)
            if len(seen) == PROMPTS * SAMPLES:  # the last sample of the rollout: training and the update follow
                os.kill(engine_pids()[0], signal.SIGSTOP)
            return by_index(args, sample)

        expected = (
            rf"engine http://\S+: /pause_generation did not finish within its deadline of {seconds:g} s "
            r"\(--engine-request-timeout\): engine-0 \(pid \d+\) is stopped \(SIGSTOP\)"
        )
        with pytest.raises(RunFailed, match=expected):
            train(folder, tmp_path / f"{seconds:g}", strikes_last, engine_request_timeout=seconds)
        assert len(seen) == PROMPTS * SAMPLES

    with_more_time(check, 4.0, 40.0)


# rewards


async def hangs_awaiting(args: Any, sample: Sample) -> float:
    await asyncio.Event().wait()
    return 0.0


def hangs_in_thread(args: Any, sample: Sample) -> float:
    threading.Event().wait()
    return 0.0


def hangs_for_groups(args: Any, samples: list[Sample]) -> list[float]:
    threading.Event().wait()
    return []


@pytest.mark.parametrize(
    ("reward", "flags"),
    [(hangs_awaiting, {}), (hangs_in_thread, {}), (hangs_for_groups, {"group_rm": True})],
    ids=["async", "plain", "group"],
)
def test_hung_reward_error_names_function_and_flag(
    reward: Any, flags: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    sentence = rf"the given reward function {reward.__name__} did not answer within 2 s \(--reward-timeout\)"
    with pytest.raises(
        RunFailed, match=rf"rollout 0: all 8 samples failed; the first one: reward: RewardTimeout: {sentence}"
    ):
        train(folder, tmp_path, reward, reward_timeout=2.0, **flags)
    log = driver_log(tmp_path)
    assert re.search(rf"ERROR .*a sample failed \(reward: RewardTimeout: {sentence}\)", log)


def test_single_hung_reward_fails_only_its_sample(folder: Path, tmp_path: Path) -> None:
    def one_hangs(args: Any, sample: Sample) -> float:
        if sample.index == 3:
            threading.Event().wait()
        return by_index(args, sample)

    def check(seconds: float) -> None:
        result = train(folder, tmp_path / f"{seconds:g}", one_hangs, reward_timeout=seconds)
        assert [metrics["rollout/failed/count"] for metrics in result.metrics] == [1.0, 0.0]
        assert result.metrics[0]["rollout/failed/reward"] == 1.0

    with_more_time(check, 2.0, 20.0)


def assert_graph(log: str, line: str) -> None:
    assert re.search(rf"wait-for graph:\n(  .*\n)*?  .*{line}", log), log[-4000:]


# trainers


def test_dead_rank_is_named(folder: Path, tmp_path: Path) -> None:
    def murderous(args: Any, sample: Sample) -> float:
        if sample.index == 5:
            os.kill(trainer_pid(1), signal.SIGKILL)
        return by_index(args, sample)

    with pytest.raises(RunFailed, match=r"^trainer-1 ended during train \(exit code -9\)"):
        train(folder, tmp_path, murderous, actor_num_gpus_per_node=2)


def test_stopped_rank_is_named_with_state_and_flag(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int] = []

    def stopping(args: Any, sample: Sample) -> float:
        if sample.index == 5:
            stopped.append(trainer_pid(1))
            os.kill(stopped[0], signal.SIGSTOP)
        return by_index(args, sample)

    patient = TrainerGroup.train

    def impatient(self: TrainerGroup, *args: Any, **kwargs: Any) -> Any:
        running_out = when_rank_0_waits(self, run_out_of_time)  # the flag is in minutes
        try:
            return patient(self, *args, **kwargs)
        finally:
            running_out.join()

    watched: dict[str, Source] = {}
    shown: list[Any] = []
    timed_out = RankProcesses._timeout

    def shown_then(self: RankProcesses, *args: Any) -> Any:
        shown.append(watched["trainer"]())
        return timed_out(self, *args)

    monkeypatch.setattr(TrainerGroup, "train", impatient)
    monkeypatch.setattr(RankProcesses, "_timeout", shown_then)
    monkeypatch.setattr(Progress, "watch", lambda _, part, source: watched.update({part: source}))
    with pytest.raises(RunFailed) as caught:
        train(folder, tmp_path, stopping, actor_num_gpus_per_node=2)
    assert shown == [("preparing the samples", True)]  # the state that a progress display shows during the wait
    first = str(caught.value).splitlines()[0]
    assert re.match(
        r"driver waited [\d.]+ s for trainer-0, trainer-1 to finish train, the last [\d.]+ s without progress "
        r"\(--distributed-timeout-",
        first,
    )
    assert f"trainer-1 (pid {stopped[0]}) is stopped (SIGSTOP)" in first
    assert_graph(
        str(caught.value),
        r"driver waits for trainer-0, trainer-1 to finish train: \d+\.\d s, without progress for \d+\.\d s of 600 s",
    )
