"""Tests trainer sleep: memory is freed, and training continues unchanged after wake-up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.train import offload
from slime.train.offload import TrainerOffload
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]


def storages_of(run: InProcess) -> list[torch.UntypedStorage]:
    """Return the storages of all resident tensors of the trainer's models."""
    found = []
    for model in (run.trainer.actor, run.trainer.critic):
        if model is not None:
            found += [tensor.untyped_storage() for one in model.backend.resident() for tensor in one.tensors]
    return found


def sleeper_of(run: InProcess) -> TrainerOffload:
    models = [one.backend for one in (run.trainer.actor, run.trainer.critic) if one is not None]
    sleeper = run.trainer.sleeper = TrainerOffload(models, torch.device("cpu"), smallest=0)
    return sleeper


FLAGS: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "num_rollout": 3}


def test_sleep_and_wake_do_not_change_training(model_folder: Folder, tmp_path: Path) -> None:
    flags = FLAGS | {"advantage_estimator": "ppo"}
    plain = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
    expected = [plain.train(step, make_samples(3, 3, seed=step))["metrics"] for step in range(3)]
    run = InProcess(config_for(model_folder("qwen3"), tmp_path, **flags))
    sleeper = sleeper_of(run)
    found = []
    for step in range(3):
        run.trainer.sleep()
        assert {storage.nbytes() for storage in storages_of(run)} == {0}
        run.trainer.wake()
        assert all(storage.nbytes() for storage in storages_of(run))
        found.append(run.train(step, make_samples(3, 3, seed=step))["metrics"])
    assert found == expected
    run.trainer.sleep()
    with run.trainer.awake("weights"):
        assert all(torch.equal(run.weights[name], tensor) for name, tensor in plain.weights.items())
        assert sleeper.is_asleep, "the optimizer sleeps on"
    assert {storage.nbytes() for storage in storages_of(run)} == {0}


def test_sleep_reuses_host_memory_and_skips_unchanged_tensors(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    copied: list[int] = []
    make, read = offload.pinned_bytes, offload._bytes_of
    monkeypatch.setattr(offload, "pinned_bytes", lambda size: (taken.append(size), make(size))[1])
    monkeypatch.setattr(offload, "_bytes_of", lambda storage: (copied.append(storage.nbytes()), read(storage))[1])
    run = InProcess(config_for(model_folder("qwen3"), tmp_path, **FLAGS))
    sleeper = sleeper_of(run)
    backend = run.trainer.actor.backend
    run.train(0, make_samples(3, 3))
    sleeper.sleep()
    kinds = {one.kind: one for one in backend.resident()}
    held = {one: sum(host.numel() for host in sleeper._parked[0, one]._hosts) for one in kinds}
    copied.clear()
    sleeper.wake()
    assert sum(copied) == held["weights"] + held["frozen ref"]
    sleeper.load_rest()
    assert sum(copied) == sum(held.values()), "the optimizer's state comes when it is asked for"
    taken.clear()
    copied.clear()
    run.train(1, make_samples(3, 3))
    sleeper.sleep()
    sleeper.settle()
    assert sum(taken) == 0
    assert held["frozen ref"] > 0
    assert sum(copied) == held["weights"] + held["optimizer"], "once each, and the reference not at all"


def test_checkpoint_saved_while_asleep_resumes_exactly(model_folder: Folder, tmp_path: Path) -> None:
    config = config_for(model_folder("qwen3"), tmp_path, save=str(tmp_path / "c"), load=str(tmp_path / "c"), **FLAGS)
    run = InProcess(config)
    sleeper_of(run)
    run.train(0, make_samples(3, 3))
    before = run.weights
    run.trainer.sleep()
    with run.trainer.awake("everything"):
        run.trainer.save(0)
    again = InProcess(config)
    assert again.start == 1
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in before.items())
    run.trainer.wake()
    same = [one.train(1, make_samples(3, 3, seed=1))["metrics"] for one in (run, again)]
    assert same[0] == same[1]
