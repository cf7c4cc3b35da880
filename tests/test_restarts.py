"""Automatic restarts of a run: errors that trigger one, the checkpoint it resumes from, and the joined result."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import slime.driver.loop
import slime.driver.recovery
from slime.cluster.node import NodeLost
from slime.config import Config, derive
from slime.driver.inputs import TrainingResult
from slime.driver.recovery import RESTARTABLE_ERRORS, RestartPolicy, config_for_restart
from slime.engine.http.errors import EngineRejected
from slime.errors import RunFailed, UserError
from slime.observability.metrics import MetricsLog, read_metrics
from slime.train.checkpoints.errors import NotWritten
from slime.train.processes import TrainerDied
from tests.tiny_models import make_model_folder


@dataclass
class FakeAttempt:
    """Fake attempt that starts at rollout `start` and trains up to rollout `trained`."""

    start: int = 0
    trained: int | None = None
    saved: int | None = None
    wandb_run_id: str | None = None
    result: TrainingResult = field(default_factory=lambda: TrainingResult(Path("unused")))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the restart delays in seconds instead of sleeping."""
    slept: list[float] = []
    monkeypatch.setattr(slime.driver.recovery.time, "sleep", slept.append)
    return slept


def config(**changes: Any) -> Config:
    return derive(Config(**{"rollout_batch_size": 1, "num_rollout": 9, "hf_checkpoint": "model"} | changes))


def test_no_restart_before_the_first_successful_start() -> None:
    lives = RestartPolicy(config(max_restarts=5))
    assert not lives.prepare_restart(TrainerDied("trainer-0 ended during init"))


def test_restart_limit_counts_attempts_without_progress() -> None:
    lives = RestartPolicy(config(max_restarts=2))

    def dies(trained: int | None) -> bool:
        lives.began(FakeAttempt(trained=trained))
        return lives.prepare_restart(TrainerDied("trainer-0 ended"))

    assert [dies(None), dies(3), dies(3), dies(3)] == [True, True, True, False]
    lives = RestartPolicy(config(max_restarts=2))
    assert [dies(0), dies(0), dies(1), dies(0), dies(None), dies(2)] == [True, True, True, True, False, True]
    assert lives.prepare_restart(NodeLost("trainers could not start"))  # an attempt that did not start counts too
    assert not lives.prepare_restart(NodeLost("trainers could not start"))


def test_restart_delays_grow_without_progress(pauses: list[float]) -> None:
    lives = RestartPolicy(config(max_restarts=4))
    lives.began(FakeAttempt(trained=1))
    while lives.prepare_restart(NodeLost("still placed on a dead node")):
        pass
    assert pauses == [0.0, 5.0, 30.0, 30.0]


def test_default_restart_limit_is_0_and_3_on_ray() -> None:
    for flags, expected in (({}, 0), ({"cluster": "ray"}, 3), ({"cluster": "ray", "max_restarts": 0}, 0)):
        lives, count = RestartPolicy(config(**flags)), 0
        lives.began(FakeAttempt())
        while lives.prepare_restart(TrainerDied("again")):
            count += 1
            lives.began(FakeAttempt())
        assert count == expected


def test_restart_resumes_from_the_own_checkpoint_once_one_exists() -> None:
    given = config(
        max_restarts=1, load="elsewhere", save="own", ckpt_step=7, start_rollout_id=3, no_load_optim=True,
        no_load_rng=True, advantage_estimator="ppo", critic_load="other-critic",
    )  # fmt: skip
    lives = RestartPolicy(given)
    lives.began(FakeAttempt(trained=3))
    assert lives.prepare_restart(TrainerDied("early"))
    assert lives.config == given
    lives.began(FakeAttempt(trained=4, saved=4, wandb_run_id="w1"))
    assert lives.prepare_restart(TrainerDied("later"))
    changed = {
        "load": "own", "critic_load": "own/critic", "ckpt_step": None, "start_rollout_id": None,
        "no_load_optim": False, "no_load_rng": False, "wandb_run_id": "w1",
    }  # fmt: skip
    assert lives.config == given.replace(**changed)
    # without --save there is no own checkpoint to resume from
    assert config_for_restart(config(load="elsewhere"), checkpointed=True).load == "elsewhere"


def test_results_of_all_attempts_are_joined() -> None:
    def lived(start: int, rollouts: range, evaluations: list[int], life: str, **more: Any) -> FakeAttempt:
        result = TrainingResult(Path("run"), [{"r": r, "life": life} for r in rollouts])
        result.evaluations = [(step, {"life": life}) for step in evaluations]
        return FakeAttempt(start, trained=rollouts.stop - 1, result=result, **more)

    lives = RestartPolicy(config(max_restarts=3))
    lives.began(lived(2, range(2, 5), [2, 4], "first", saved=3))
    assert lives.prepare_restart(TrainerDied("once"))
    lives.began(lived(4, range(4, 5), [], "second"))
    assert lives.prepare_restart(TrainerDied("twice"))
    last = lived(4, range(4, 7), [6], "third")
    lives.began(last)
    lives.complete(last)
    assert [(one["r"], one["life"]) for one in last.result.metrics] == [
        (2, "first"), (3, "first"), (4, "third"), (5, "third"), (6, "third"),
    ]  # fmt: skip
    assert last.result.evaluations == [(2, {"life": "first"}), (4, {"life": "first"}), (6, {"life": "third"})]
    assert last.result.seconds > 0


@pytest.fixture
def run_flags(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1?", "label": "2"}\n' * 4)
    return {
        "hf_checkpoint": str(make_model_folder(tmp_path / "model")), "prompt_data": str(tmp_path / "prompts.jsonl"),
        "rm_type": "math", "label_key": "label", "rollout_batch_size": 2, "n_samples_per_prompt": 2,
        "global_batch_size": 4, "num_rollout": 2, "device": "cpu", "output_dir": str(tmp_path / "run"),
        "max_restarts": 2, "progress": "none",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "lives"),
    [
        (TrainerDied("trainer-0 ended"), 3),
        (NodeLost("node-1 is gone"), 3),
        (UserError("fix it"), 1),
        (KeyboardInterrupt(), 1),
        (NotWritten("the disk is full"), 1),
        (RunFailed("all samples failed"), 1),
        (EngineRejected("http://e", "/generate", 400, "our mistake"), 1),
        (ValueError("a bug"), 1),
    ],
)
def test_only_restartable_errors_restart_with_a_new_data_source(
    error: BaseException, lives: int, run_flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def live(of: RestartPolicy, device: str, run_dir: Any, data_source: Any, *_: Any) -> Any:
        seen.append(data_source)
        of.began(FakeAttempt())
        raise error

    monkeypatch.setattr(slime.driver.loop, "_live", live)
    with pytest.raises(type(error)):
        slime.driver.loop.train(Config(**run_flags))
    assert isinstance(error, RESTARTABLE_ERRORS) == (lives > 1)
    assert len({id(one) for one in seen}) == len(seen) == lives


def test_metrics_of_an_attempt_without_checkpoint_are_overwritten(tmp_path: Path) -> None:
    def write(count: int, *, again: bool) -> None:
        with MetricsLog(tmp_path, config(), start_rollout_id=0, again=again) as log:
            for rollout_id in range(count):
                log.log({"x": rollout_id}, rollout_id)

    write(3, again=False)
    write(2, again=True)
    assert [record["x"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    assert [path.name for path in tmp_path.glob("metrics*")] == ["metrics.jsonl"]
    write(1, again=False)  # an unrelated run sets the old file aside
    assert sorted(path.name for path in tmp_path.glob("metrics*")) == ["metrics.1.jsonl", "metrics.jsonl"]
