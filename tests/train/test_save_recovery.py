"""Tests the rescue of weights when a disk is full or lost: fallback folders and error messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import slime.driver.recovery
from slime.config import Config
from slime.driver.recovery import rescue_weights
from slime.errors import RunFailed, UserError
from slime.storage.sqlite_store import JournalFailed
from slime.train.checkpoints.errors import NotWritten, write_together
from tests.small_disk import small_disk
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]


class Trainers:
    """A real trainer with the interface of the driver's trainer group."""

    is_usable = True

    def __init__(self, config: Config) -> None:
        self.inner = InProcess(config)
        self.inner.train(0, make_samples(3, 3))

    def save_hf(self, path: str) -> Path:
        return Path(self.inner.trainer.save_hf(str(path)))

    def save(self, rollout_id: int, folder: str | None = None) -> Path:
        return Path(self.inner.trainer.save(rollout_id, folder))

    def finish_save(self) -> int | None:
        saved = self.inner.trainer.finish_save(patient=True)
        return None if saved is None else int(Path(saved).name.removeprefix("iter_"))


@dataclass
class Run:
    config: Config
    trainers: Trainers | None
    trained: int | None = 0
    saved: int | None = None


@pytest.fixture(scope="module")
def trainers(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Trainers:
    return Trainers(config_for(model_folder("qwen3"), tmp_path_factory.mktemp("out")))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the temporary folder and shared memory to the test's folder."""
    for name in ("tmp", "shm"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(slime.driver.recovery, "SHARED_MEMORY", tmp_path / "shm")
    return tmp_path


def run_of(trainers: Trainers, tmp_path: Path, **flags: str) -> Run:
    config = trainers.inner.config.replace(output_dir=str(tmp_path / "out"), **flags)
    return Run(config, trainers)


def failure(run: Run, what: Callable[[], object]) -> str:
    with pytest.raises(RunFailed) as caught, rescue_weights(run):
        what()
    assert type(caught.value) is RunFailed
    return str(caught.value)


def assert_has_weights(trainers: Trainers, folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    for name, tensor in trainers.inner.trainer.actor.backend.full_parameters():
        if name in saved:
            assert torch.equal(saved[name], tensor), name
    assert len(saved) > 10


def only(folder: Path) -> Path:
    (found,) = [path for path in folder.iterdir() if not path.name.endswith("-checkpoint")]
    return found


def test_full_disk_saves_weights_in_the_output_folder(
    trainers: Trainers, elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(elsewhere / "disk") as disk:
        run = run_of(trainers, elsewhere, save_hf=str(disk / "hf"))
        sentence = failure(run, lambda: trainers.save_hf(str(disk / "hf")))
        assert list(disk.iterdir()) == []
    kept = only(elsewhere / "out")
    assert kept.name.startswith("rescued-")
    assert sentence.startswith(f"cannot write the Hugging Face folder {disk}/hf: ")
    assert "No space left on device" in sentence
    assert sentence.endswith(f"; the weights after rollout 0 are saved in {kept}, a Hugging Face folder")
    assert_has_weights(trainers, kept)
    assert [record.getMessage() for record in caplog.records] == [f"saving the weights in {kept}"]  # no second try


def test_failed_checkpoint_is_saved_with_the_rescued_weights(trainers: Trainers, elsewhere: Path) -> None:
    with small_disk(elsewhere / "disk") as disk:
        run = run_of(trainers, elsewhere, save=str(disk))
        sentence = failure(run, lambda: trainers.save(0, str(disk)))
        assert list(disk.iterdir()) == []
    kept = only(elsewhere / "out")
    assert sentence.startswith(f"cannot write the checkpoint of rollout 0 to {disk}/iter_0000000: ")
    assert sentence.endswith(
        f"; the weights after rollout 0 are saved in {kept}, a Hugging Face folder, and a checkpoint to resume from "
        f"with --load {kept}-checkpoint"
    )
    resumed = InProcess(trainers.inner.config.replace(load=f"{kept}-checkpoint"))
    assert resumed.start == 1
    for name, tensor in resumed.weights.items():
        assert torch.equal(tensor, trainers.inner.weights[name]), name


@pytest.mark.parametrize("full", [("out",), ("out", "tmp"), ("out", "tmp", "shm")])
def test_rescue_tries_the_next_folder_when_one_fails(
    trainers: Trainers, elsewhere: Path, full: tuple[str, ...]
) -> None:
    for name in full:
        if (elsewhere / name).exists():
            (elsewhere / name).rmdir()
        (elsewhere / name).touch()  # a file in place of the folder
    (elsewhere / "lost").touch()
    sentence = failure(
        run_of(trainers, elsewhere, save_hf=str(elsewhere / "lost/hf")),
        lambda: raise_(OSError(errno.EIO, os.strerror(errno.EIO), "metrics.jsonl")),
    )
    assert sentence.startswith("cannot write to disk: [Errno 5] Input/output error: 'metrics.jsonl'; ")
    place = {1: "tmp", 2: "shm", 3: None}[len(full)]
    if place is None:
        assert "; could not save the weights after rollout 0 anywhere (" in sentence
        return
    kept = only(elsewhere / place)
    assert f"the weights after rollout 0 are saved in {kept}, a Hugging Face folder" in sentence
    assert_has_weights(trainers, kept)


def test_rescue_tries_configured_folders_first(trainers: Trainers, elsewhere: Path) -> None:
    run = run_of(trainers, elsewhere, save_hf=str(elsewhere / "hf_{rollout_id}"), save=str(elsewhere / "ckpt"))
    sentence = failure(run, lambda: raise_(JournalFailed("journal.sqlite: cannot be written (disk is full)")))
    assert sentence == (
        "journal.sqlite: cannot be written (disk is full); the weights after rollout 0 are saved in "
        f"{elsewhere}/hf_0, a Hugging Face folder, and a checkpoint to resume from with --load {elsewhere}/ckpt"
    )
    assert_has_weights(trainers, elsewhere / "hf_0")
    assert (elsewhere / "ckpt/iter_0000000/meta.json").is_file()
    assert not (elsewhere / "out").exists()


def test_rescue_saves_nothing_when_not_needed(trainers: Trainers, elsewhere: Path) -> None:
    lost = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for trained, saved, words in ((None, None, "nothing was trained yet"), (3, 3, "after rollout 3 were saved before")):
        run = run_of(trainers, elsewhere, save_hf=str(elsewhere / "hf"))
        run.trained, run.saved = trained, saved
        assert failure(run, lambda: raise_(lost)).endswith(words)
    asked_for_nothing = "the weights are not saved, as neither --save nor --save-hf is set"
    assert failure(run_of(trainers, elsewhere), lambda: raise_(lost)).endswith(asked_for_nothing)
    for error in (ConnectionResetError("engine"), UserError("typo"), KeyboardInterrupt()):
        with pytest.raises(type(error)), rescue_weights(run_of(trainers, elsewhere)):
            raise error
    assert not (elsewhere / "out").exists()


def test_rescue_waits_for_a_running_save(trainers: Trainers, elsewhere: Path) -> None:
    lost = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    trainers.inner.trainer.save(0, str(elsewhere / "ckpt"), in_background=True)
    run = run_of(trainers, elsewhere, save=str(elsewhere / "ckpt"))
    assert failure(run, lambda: raise_(lost)).endswith("the weights after rollout 0 were saved before")
    assert (elsewhere / "ckpt/latest_checkpointed_iteration.txt").read_text() == "0\n"
    with small_disk(elsewhere / "disk") as disk:
        trainers.inner.trainer.save(0, str(disk), in_background=True)
        run = run_of(trainers, elsewhere, save=str(disk))
        sentence = failure(run, lambda: raise_(lost))
    kept = only(elsewhere / "out")
    assert f"the weights after rollout 0 are saved in {kept}, a Hugging Face folder, and a checkpoint" in sentence


def test_save_hf_keeps_folder_with_foreign_files(trainers: Trainers, elsewhere: Path) -> None:
    (elsewhere / "hf").mkdir()
    (elsewhere / "hf/thesis.txt").write_text("mine")
    with pytest.raises(NotWritten, match=r"hf has thesis.txt, which no run saved there"):
        trainers.save_hf(str(elsewhere / "hf"))
    assert [path.name for path in (elsewhere / "hf").iterdir()] == ["thesis.txt"]


def raise_(error: BaseException) -> None:
    raise error


class FakeRanks:
    """A single rank whose `union` also returns the errors of other ranks."""

    def __init__(self, *others: str) -> None:
        self.others = others

    def union(self, names: Iterable[str]) -> set[str]:
        return {*names, *self.others}


def test_rank_with_write_error_consumes_all_tensors() -> None:
    def write(tensors: Iterator[int]) -> None:
        next(tensors)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/part-00001")

    tensors = iter(range(5))
    with pytest.raises(NotWritten, match=r"^cannot write it: No space left on device \(/disk/part-00001\)$"):
        write_together(FakeRanks(), tensors, write, "it")
    assert list(tensors) == []
    tensors = iter(range(5))
    with pytest.raises(NotWritten, match=r"^cannot write it: full$"):  # the error of another rank
        write_together(FakeRanks("full"), tensors, None, "it")
    assert list(tensors) == []
    with pytest.raises(ValueError, match="a bug"):
        write_together(FakeRanks(), iter(()), lambda _: raise_(ValueError("a bug")), "it")
