"""Tests the choice of initial weights and the removal of old checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slime.config import Config
from slime.config.initial_weights import (
    LATEST,
    InitialWeights,
    check_checkpoint,
    find_initial_weights,
    find_reference_weights,
)
from slime.errors import UserError
from slime.storage.files import is_checkpoint
from slime.train.checkpoints.rank_files import SavedPart, write_parts
from slime.train.checkpoints.writer import _remove_old


def config(**changes) -> Config:
    return Config(hf_checkpoint="model", rollout_batch_size=1, **changes)


def test_without_load_the_run_starts_from_hf_checkpoint() -> None:
    assert find_initial_weights(config()) == InitialWeights()


def test_latest_file_selects_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / LATEST).write_text("12\n")
    with pytest.raises(UserError, match="names iteration '12', which does not exist"):
        find_initial_weights(config(load=str(tmp_path)))
    folder = tmp_path / "iter_0000012"
    folder.mkdir()
    (folder / "meta.json").write_text("{}")
    assert find_initial_weights(config(load=str(tmp_path))) == InitialWeights(checkpoint=folder, flag="--load")
    assert find_initial_weights(config(load=str(folder))) == InitialWeights(checkpoint=folder, flag="--load")


def test_finds_checkpoint_set_aside_by_an_interrupted_replacement(tmp_path: Path) -> None:
    (tmp_path / LATEST).write_text("12\n")
    aside = tmp_path / ".iter_0000012.old-77"
    aside.mkdir()
    (aside / "meta.json").write_text("{}")
    assert find_initial_weights(config(load=str(tmp_path))) == InitialWeights(checkpoint=aside, flag="--load")
    make_checkpoint(tmp_path / "iter_0000012")
    assert find_initial_weights(config(load=str(tmp_path))).checkpoint == tmp_path / "iter_0000012"
    _remove_old(tmp_path, None, keep=tmp_path / "iter_0000012")
    assert not aside.exists()


def test_rejects_checkpoint_with_a_missing_file(tmp_path: Path) -> None:
    for rank in range(2):
        write_parts(tmp_path, rank, [SavedPart("model", "x", torch.ones(2), (4,), (2 * rank,))])
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    (tmp_path / "meta.json").write_text(json.dumps({"format": 2, "model": {}, "files": files}))
    check_checkpoint(tmp_path, "--load")
    assert is_checkpoint(tmp_path)
    (tmp_path / "model-r00001-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks 1 of its files, model-r00001-00001\.safetensors first: choose another"):
        check_checkpoint(tmp_path, "--load")


def test_load_of_a_model_folder_gives_weights_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_initial_weights(config(load=str(tmp_path))) == InitialWeights(hf_folder=tmp_path, flag="--load")


@pytest.mark.parametrize("load", ["", "nowhere"])
def test_load_folder_without_checkpoint_starts_fresh(tmp_path: Path, load: str) -> None:
    folder = str(tmp_path / load)
    assert (
        find_initial_weights(config(load=folder))
        == find_initial_weights(config(load=folder, save=folder))
        == InitialWeights()
    )
    reference = InitialWeights(hf_folder=Path("ref"), flag="--ref-load")
    assert (
        find_initial_weights(config(load=folder, ref_load="ref"))
        == find_reference_weights(config(ref_load="ref"))
        == reference
    )


def make_checkpoint(folder: Path) -> None:
    folder.mkdir()
    (folder / "meta.json").write_text('{"format": 1, "model": {}}')
    for name in ("model-00001.safetensors", "optim-00001.safetensors", "rng.safetensors"):
        (folder / name).touch()


def test_keeps_last_two_checkpoints_and_unrelated_files(tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    for number in range(5):
        make_checkpoint(tmp_path / f"iter_{number:07d}")
        if number != 1:  # a custom data source may save no state
            (tmp_path / "rollout" / f"data_state_{number}.json").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / ".iter_0000009.tmp-1").mkdir()
    (tmp_path / ".iter_notes.tmp-mine").mkdir()
    (tmp_path / "iter_0000100").mkdir()  # a Megatron checkpoint, which has the same naming
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir()
    make_checkpoint(tmp_path / "iter_0000099")
    (tmp_path / "iter_0000099" / "my_notes.txt").touch()
    _remove_old(tmp_path, 2, keep=tmp_path / "iter_0000004")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".iter_notes.tmp-mine", "iter_0000003", "iter_0000004", "iter_0000099", "iter_0000100", "notes", "rollout"
    ]  # fmt: skip
    states = sorted(p.name for p in (tmp_path / "rollout").iterdir())
    assert states == ["data_state_3.json", "data_state_4.json"]
