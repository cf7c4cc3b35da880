"""Tests model folders: errors for broken folders, complete and atomic saves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.errors import UserError
from slime.models.loading import load_causal_lm
from slime.models.meta_model import load_meta_model
from slime.models.saving import save_hf_folder
from slime.storage.files import MANIFEST

Folder = Callable[[str], Path]


def load(folder: Path):
    return load_causal_lm(folder, dtype=torch.float32, device="cpu", attn_implementation="sdpa")


def outline(folder: Path):
    return load_meta_model(folder, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture
def folder(model_folder: Folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder("qwen3"), tmp_path / "model"))


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_loads_every_weight(folder: Path) -> None:
    model = load(folder)
    stored = load_file(folder / "model.safetensors")
    assert not model.training
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: shutil.rmtree(f), "does not exist"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{nonsense"), "cannot be read as JSON"),
        (lambda f: edit_config(f, model_type="qwen99"), "unknown model_type 'qwen99'"),
        (lambda f: edit_config(f, model_type="vit"), "not a causal language model"),
        (lambda f: (f / "model.safetensors").unlink(), "no \\*.safetensors weights"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 50), "cannot be loaded"),
        (lambda f: edit_config(f, num_hidden_layers=3), "not a valid qwen3 config: .num_hidden_layers. \\(3\\)"),
        (lambda f: edit_config(f, num_hidden_layers=3, layer_types=["full_attention"] * 3), "lack model.layers.2"),
        (
            lambda f: edit_config(f, intermediate_size=96),
            "shape .*128.* but its config.json asks for .*96|cannot be loaded",
        ),
        (
            lambda f: (f / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 500}}})),
            "ids up to 500 but the model's vocab_size is 128",
        ),
    ],
)
@pytest.mark.parametrize("read", [load, outline])
def test_rejects_broken_model_folders(folder: Path, read, spoil, message) -> None:
    spoil(folder)
    with pytest.raises(UserError, match=message):
        read(folder)


def test_saved_folder_is_complete_and_sharded(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    tensors = {f"{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    out = save_hf_folder(iter(tensors.items()), folder, tmp_path / "out", torch.bfloat16, max_shard_bytes=30_000)
    assert (out / "model.safetensors.index.json").exists()
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert (out / "tokenizer.json").exists()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    for name, tensor in tensors.items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_saving_replaces_only_folders_saved_by_a_run(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    out = tmp_path / "out"
    save_hf_folder(tensors, folder, out, torch.float32)
    save_hf_folder({name: tensor + 1 for name, tensor in tensors.items()}, folder, out, torch.float32)
    name = "model.norm.weight"
    assert torch.equal(load_file(out / "model.safetensors")[name], tensors[name] + 1)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=r"precious has thesis.txt, which no run saved there"):
        save_hf_folder(tensors, folder, precious, torch.float32)
    assert (precious / "thesis.txt").read_text() == "x"
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match="which no run saved there"):
        save_hf_folder(tensors, folder, folder, torch.float32)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("added", ["notes/day1.txt", "model.safetensors", "empty/"])
def test_saving_keeps_a_folder_with_added_files(folder: Path, tmp_path: Path, added: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    out = save_hf_folder(tensors, folder, tmp_path / "out", torch.float32)
    if added.endswith("/"):
        (out / added).mkdir()
    else:
        (out / added).parent.mkdir(exist_ok=True)
        (out / added).write_text("mine")
    with pytest.raises(UserError, match=rf"out has {added.strip('/')}, which no run saved there"):
        save_hf_folder(tensors, folder, out, torch.float32)
    assert (out / added).is_dir() if added.endswith("/") else (out / added).read_text() == "mine"


def test_saving_keeps_files_created_during_the_save(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")

    def slowly():
        yield from tensors.items()
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").touch()

    with pytest.raises(UserError, match=r"out has mine.txt, which no run saved there"):
        save_hf_folder(slowly(), folder, tmp_path / "out", torch.float32)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_saving_follows_symlinks_and_excludes_copied_manifest(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for _ in range(2):
        assert save_hf_folder(tensors, folder, tmp_path / "link", torch.float32) == tmp_path / "disk"
    assert (tmp_path / "link").is_symlink()
    assert not list(tmp_path.glob(".*"))
    again = save_hf_folder(tensors, tmp_path / "disk", tmp_path / "again", torch.float32)
    assert json.loads((again / MANIFEST).read_text())["files"]["model.safetensors"] > 0
    assert MANIFEST not in json.loads((again / MANIFEST).read_text())["files"]


def test_failed_save_keeps_the_old_folder(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    out = save_hf_folder(tensors, folder, tmp_path / "out", torch.float32)

    def broken():
        yield from list(tensors.items())[:1]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_hf_folder(broken(), folder, out, torch.float32)
    assert set(load_file(out / "model.safetensors")) == set(tensors)
