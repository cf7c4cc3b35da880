"""Tests that `slime convert` turns a checkpoint into the model folder that the trainer saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.cli import main
from slime.models.safetensors_io import open_weights
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def saved(request: pytest.FixtureRequest, model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in `ckpt` (with fused experts) and the model folder that the trainer saved in `expected`."""
    folder = tmp_path_factory.mktemp("saved")
    run = InProcess(config_for(model_folder(request.param), folder, save=str(folder / "ckpt")))
    run.train(0, make_samples(3, 3))
    run.trainer.save(0)
    run.trainer.save_hf(str(folder / "expected"))
    return folder


def test_converted_weights_match_the_folder_saved_by_the_trainer(saved: Path, tmp_path: Path) -> None:
    expected = dict(open_weights(saved / "expected"))
    for number, source in enumerate((saved / "ckpt", saved / "ckpt" / "iter_0000000")):
        out = tmp_path / str(number)
        assert main(["convert", str(source), str(out), "--dtype", "float32"]) == 0
        found = dict(open_weights(out))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert (out / "config.json").read_text() == (saved / "expected" / "config.json").read_text()


def test_rejects_folder_of_another_model(
    saved: Path, model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(saved / "ckpt"), str(tmp_path / "out"), "--hf-checkpoint", str(model_folder("llama"))]
    assert main(words) == 2
    assert f"which {model_folder('llama')} lacks: it is of another model, or a critic's" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_moved_model_folder_requires_hf_checkpoint(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "iter_0000000"
    shutil.copytree(saved / "ckpt" / "iter_0000000", checkpoint)
    meta = json.loads((checkpoint / "meta.json").read_text())
    (checkpoint / "meta.json").write_text(json.dumps({**meta, "hf_checkpoint": "moved/away"}))
    assert main(["convert", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "is of the model in moved/away, which does not exist: give its folder with --hf-checkpoint" in (
        capsys.readouterr().err
    )
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--hf-checkpoint", meta["hf_checkpoint"]]) == 0


def test_add_missing_copies_untrained_weights(saved: Path, tmp_path: Path) -> None:
    """For example layers for multi-token prediction, which transformers does not load."""
    meta = json.loads((saved / "ckpt" / "iter_0000000" / "meta.json").read_text())
    folder = tmp_path / "with-more"
    shutil.copytree(meta["hf_checkpoint"], folder)
    save_file({"model.layers.2.eh_proj.weight": torch.ones(3)}, folder / "model-mtp.safetensors")
    words = ["convert", str(saved / "ckpt"), str(tmp_path / "out"), "--hf-checkpoint", str(folder)]
    assert main(words) == 0
    assert "model.layers.2.eh_proj.weight" not in open_weights(tmp_path / "out")
    assert main([*words, "--add-missing", "--force"]) == 0
    assert torch.equal(open_weights(tmp_path / "out")["model.layers.2.eh_proj.weight"], torch.ones(3).bfloat16())


def test_rejects_incomplete_or_missing_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    megatron = tmp_path / "megatron" / "iter_0000003"
    megatron.mkdir(parents=True)
    (megatron.parent / "latest_checkpointed_iteration.txt").write_text("3")
    (megatron / "__0_0.distcp").touch()
    assert main(["convert", str(megatron.parent), str(tmp_path / "out")]) == 2
    assert "is a Megatron checkpoint (torch_dist, iter_0000003) without .metadata" in capsys.readouterr().err
    (megatron / ".metadata").touch()
    assert main(["convert", str(megatron.parent), str(tmp_path / "out")]) == 2
    assert "name the Hugging Face folder of that model with --hf-checkpoint" in capsys.readouterr().err
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is neither a checkpoint (meta.json) nor a model folder (config.json)" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "there is no folder" in capsys.readouterr().err
