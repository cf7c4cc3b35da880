"""Tests that a process killed at any point of a save leaves a complete policy and critic checkpoint.

A child process gets SIGKILL before its n-th file operation in the checkpoint folder, for every n.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config.initial_weights import check_weight_sources, find_critic_weights, find_initial_weights
from slime.train.checkpoints.reader import SavedTensors
from tests.rows import long
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]
Pair = dict[str, dict[str, torch.Tensor]]
TOUCHES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
ROLES = ("", "critic")


def run_and_kill(action: Callable[[], Any], folder: Path, number: int) -> bool:
    """Run `action` in a child that is killed before its n-th operation in `folder`; return whether it was killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks with several threads; the child does not need them
        pid = os.fork()
    if pid == 0:
        try:
            sys.addaudithook(_killer(str(folder), number))
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def _killer(folder: str, number: int) -> Callable[[str, tuple[Any, ...]], None]:
    touched = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal touched
        if event in TOUCHES and str(arguments[0]).startswith(folder):
            touched += 1
            if touched == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def flags(folder: Path, **changes: Any) -> dict[str, Any]:
    pair = {"advantage_estimator": "ppo", "save": str(folder), "load": str(folder), "ckpt_keep": 1}
    return {**pair, "async_save": True, **changes}


@pytest.fixture(scope="module")
def trained(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[InProcess, Path, list[Pair]]:
    """A run after two rollouts, its checkpoint after the first one, and the weights of both."""
    folder = tmp_path_factory.mktemp("killed") / "ckpt"
    run = InProcess(config_for(model_folder("qwen3"), folder.parent, **flags(folder)))
    run.train(0, make_samples(3, 3))
    run.trainer.save(0, in_background=False)
    weights = [saved_weights(folder / "iter_0000000")]
    run.train(1, make_samples(3, 3, seed=1))
    run.trainer.save(1, str(folder.parent / "later"), in_background=False)
    weights.append(saved_weights(folder.parent / "later" / "iter_0000001"))
    return run, folder, weights


def saved_weights(checkpoint: Path) -> Pair:
    folders = {role: checkpoint.parent / role / checkpoint.name for role in ROLES}
    return {f"{role}/{kind}": dict(SavedTensors(folders[role], kind)) for role in ROLES for kind in ("model", "optim")}


def equal(one: Pair, other: Pair) -> bool:
    return all(
        one[key].keys() == other[key].keys() and all(torch.equal(t, other[key][name]) for name, t in one[key].items())
        for key in one
    )


def restore_folder(source: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if source.exists():
        shutil.copytree(source, folder)


def check_complete_checkpoint(config: Any, weights: list[Pair]) -> int | None:
    """Return the rollout that the run would resume after, and check its checkpoints are complete."""
    check_weight_sources(config)
    start = find_initial_weights(config).checkpoint
    if start is None:
        assert find_critic_weights(config).checkpoint is None
        return None
    number = int(start.name[-7:])
    critic = find_critic_weights(config).checkpoint
    assert critic is not None
    assert critic.name == start.name
    assert equal(saved_weights(start), weights[number])
    return number


@pytest.mark.parametrize(("in_background", "earlier"), [(True, True), long(False, False)])
def test_kill_at_any_step_of_a_save_leaves_a_complete_checkpoint_pair(
    in_background: bool,
    earlier: bool,
    trained: tuple[InProcess, Path, list[Pair]],
    tmp_path: Path,
    model_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, source, weights = trained
    folder = tmp_path / "ckpt"
    config = config_for(model_folder("qwen3"), tmp_path, **flags(folder))
    monkeypatch.setattr(run.trainer, "config", config)

    def save() -> None:
        run.trainer.save(1, in_background=in_background)
        assert run.trainer.finish_save(patient=True) == (str(folder / "iter_0000001") if in_background else None)

    found: list[int | None] = []
    number = 0
    while True:
        number += 1
        restore_folder(source if earlier else tmp_path / "nothing", folder)
        if not run_and_kill(save, folder, number):
            break
        found.append(check_complete_checkpoint(config, weights))
    assert check_complete_checkpoint(config, weights) == 1
    before = 0 if earlier else None
    assert number > 20, "folders, files, names and removals of a policy and its critic"
    switch = found.index(1)
    assert found == [before] * switch + [1] * (len(found) - switch)
    assert sorted(path.name for path in folder.iterdir()) == [
        "critic", "iter_0000001", "latest_checkpointed_iteration.txt"
    ]  # fmt: skip


def test_next_save_removes_leftovers_of_a_killed_save(
    trained: tuple[InProcess, Path, list[Pair]], tmp_path: Path, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, source, weights = trained
    folder = tmp_path / "ckpt"
    restore_folder(source, folder)
    config = config_for(model_folder("qwen3"), tmp_path, **flags(folder))
    monkeypatch.setattr(run.trainer, "config", config)
    assert run_and_kill(lambda: run.trainer.save(1, in_background=False), folder, 8)
    assert any(path.name.startswith(".iter_0000001.tmp-") for path in folder.rglob("*"))
    again = InProcess(config)
    assert again.start == 1
    again.train(1, make_samples(3, 3, seed=1))
    again.trainer.save(1, in_background=True)
    again.train(2, make_samples(3, 3, seed=2))  # not part of the checkpoint
    again.trainer.finish_save(patient=True)
    assert equal(saved_weights(folder / "iter_0000001"), weights[1])
    assert not list(folder.rglob(".*"))
