"""A policy and its critic are one checkpoint: wherever a run is killed while it saves, it goes on from a whole pair."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config.start import check_weight_sources
from slime.train.checkpoints import folder as checkpoint
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]
STEPS = ("replace_folder", "_write_latest", "_remove_old")
"""What makes a checkpoint appear, be named, and go: all that changes between two kills."""


class Killed(BaseException):
    """The process ended here."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """End the process in place of the step with this number; the steps that were made are in the list."""
    made: list[str] = []

    def guarded(name: str) -> Callable[..., None]:
        step = getattr(checkpoint, name)

        def run(*args: Any, **kwargs: Any) -> None:
            if len(made) == number:
                raise Killed
            made.append(name)
            step(*args, **kwargs)

        return run

    for name in STEPS:
        monkeypatch.setattr(checkpoint, name, guarded(name))
    return made


@pytest.fixture(scope="module")
def trained(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[InProcess, Path]:
    """A run with a checkpoint after its first rollout, and one rollout more in its memory."""
    folder = tmp_path_factory.mktemp("pair") / "ckpt"
    run = InProcess(config_for(model_folder("qwen3"), folder.parent, **flags(folder)))
    run.train(0, make_samples(3, 3))
    run.trainer.save(0)
    run.train(1, make_samples(3, 3, seed=1))
    return run, folder


def flags(folder: Path) -> dict[str, Any]:
    return {"advantage_estimator": "ppo", "save": str(folder), "load": str(folder), "ckpt_keep": 1}


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("number", range(7))
def test_a_kill_while_saving_leaves_a_pair_to_resume_from(
    number: int,
    earlier: bool,
    trained: tuple[InProcess, Path],
    tmp_path: Path,
    model_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, source = trained
    folder = tmp_path / "ckpt"
    if earlier:
        shutil.copytree(source, folder)
    config = config_for(model_folder("qwen3"), tmp_path, **flags(folder))
    monkeypatch.setattr(run.trainer, "config", config)
    with monkeypatch.context() as patch:
        made = kill_at(patch, number)
        try:
            run.trainer.save(1)
        except Killed:
            assert len(made) == number
        else:
            assert number == 6, "the steps of a save are two folders, two names and two removals"
    check_weight_sources(config)
    again = InProcess(config)
    committed = number >= 4  # both folders and both names
    assert again.start == (2 if committed else 1 if earlier else 0)
    critic = again.trainer.critic
    assert critic is not None
    assert critic.state.next_rollout_id == again.start
    again.trainer.save(2)
    assert InProcess(config).start == 3
