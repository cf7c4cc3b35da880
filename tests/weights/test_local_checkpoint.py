"""A local model folder that deltas are applied to: exact, or detected as broken and rebuilt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.errors import RunFailed
from slime.models.delta.folder import safetensors_entries
from slime.weights.delta import DeltaPublisher, LocalCheckpoint, LocalCheckpointBroken
from slime.weights.folder import VersionFolders
from slime.weights.publisher import PublisherSettings
from tests.tiny_models import make_model_folder
from tests.weights.conftest import Engine, Loop
from tests.weights.model_source import ModelSource


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3", tie_word_embeddings=True)


@pytest.fixture(params=["xor", "overwrite"])
def source(request: pytest.FixtureRequest, model_folder: Path) -> ModelSource:
    return ModelSource(model_folder, torch.bfloat16, encoding=request.param)


def write_versions(source: ModelSource, model_folder: Path, root: Path, count: int) -> list[Path]:
    """Write version 1 whole and the following as deltas, without engines."""
    settings = PublisherSettings(source, [], lambda coro: coro.close())
    where = VersionFolders(root, model_folder, keep_files=True)
    publisher = DeltaPublisher(settings, where, encoding=source.encoding, checksum=source.checksum)
    folders = []
    for version in range(1, count + 1):
        staged = publisher._stage(version, whole=False)
        publisher._retire(staged, version, arrived=True)
        folders.append(root / f"weight_v{version:06d}")
        source.step(version)
    return folders


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_applied_deltas_match_whole_weights(tmp_path: Path, model_folder: Path, source: ModelSource) -> None:
    folders = write_versions(source, model_folder, tmp_path / "versions", 3)
    local = LocalCheckpoint(tmp_path / "local")
    assert local.version is None
    local.rebuild(folders[0], 1)
    assert local.version == 1
    for version, folder in enumerate(folders[1:], start=2):
        local.apply(folder)
        assert local.version == version
    expected = ModelSource(model_folder, torch.bfloat16)
    expected.step(1)
    expected.step(2)
    found = tensors_in(tmp_path / "local")
    assert found.keys() == {name for name, _ in expected.model.named_parameters()}
    for name, parameter in expected.model.named_parameters():
        assert torch.equal(found[name], parameter.to(torch.bfloat16)), name


def test_delta_for_another_base_is_rejected(tmp_path: Path, model_folder: Path, source: ModelSource) -> None:
    folders = write_versions(source, model_folder, tmp_path / "versions", 3)
    local = LocalCheckpoint(tmp_path / "local")
    local.rebuild(folders[0], 1)
    with pytest.raises(LocalCheckpointBroken, match="applies to version 2, the folder has 1"):
        local.apply(folders[2])
    assert local.version == 1


def test_failed_delta_requires_a_rebuild(tmp_path: Path, model_folder: Path, source: ModelSource) -> None:
    folders = write_versions(source, model_folder, tmp_path / "versions", 2)
    local = LocalCheckpoint(tmp_path / "local")
    local.rebuild(folders[0], 1)
    file = next((tmp_path / "local").glob("*.safetensors"))
    entry = safetensors_entries(file)[0]
    data = bytearray(file.read_bytes())
    data[entry.start] ^= 1
    file.write_bytes(data)
    with pytest.raises(LocalCheckpointBroken, match="checksum"):
        local.apply(folders[1])
    assert local.version is None
    state = json.loads((tmp_path / "local" / ".weight_sync" / "state.json").read_text())
    assert state == {"version": "000002", "status": "applying"}
    with pytest.raises(LocalCheckpointBroken, match="the folder has None"):
        local.apply(folders[1])
    local.rebuild(folders[0], 1)
    local.apply(folders[1])
    assert local.version == 2


def test_damaged_blob_breaks_the_checkpoint(tmp_path: Path, model_folder: Path, source: ModelSource) -> None:
    folders = write_versions(source, model_folder, tmp_path / "versions", 2)
    local = LocalCheckpoint(tmp_path / "local")
    local.rebuild(folders[0], 1)
    file = next(folders[1].glob("*.safetensors"))
    entry = safetensors_entries(file)[0]
    data = bytearray(file.read_bytes())
    data[entry.start : entry.start + 4] = b"none"
    file.write_bytes(data)
    with pytest.raises(LocalCheckpointBroken, match=f"the blob of {entry.name} is not a zstd frame"):
        local.apply(folders[1])
    assert local.version is None


def test_folder_loading_engines_get_deltas_through_a_local_checkpoint(
    tmp_path: Path, model_folder: Path, source: ModelSource, engines: list[Engine], run_async: Loop
) -> None:
    publisher = DeltaPublisher(
        PublisherSettings(source, [engine.client for engine in engines], run_async),
        VersionFolders(tmp_path / "versions", model_folder),
        local=tmp_path / "local",
        encoding=source.encoding,
        checksum=source.checksum,
    )
    results = []
    for version in range(4):
        if version:
            source.step(version)
        if version == 3:
            (tmp_path / "local" / ".weight_sync" / "state.json").unlink()
        results.append(publisher.publish(version))
        for engine in engines:
            assert engine.version == str(version)
            for name, parameter in source.model.named_parameters():
                assert torch.equal(engine.tensors[name], parameter.to(torch.bfloat16)), name
    assert source.exports == ["whole 0", "delta 1", "delta 2", "delta 3", "whole 3"]
    assert [result.full_fallbacks for result in results] == [0, 0, 0, 1]
    assert results[0].density is None
    assert results[1].density is not None
    assert 0 < results[1].density < 0.1


def test_rebuild_does_not_remove_foreign_files(tmp_path: Path, model_folder: Path, source: ModelSource) -> None:
    folders = write_versions(source, model_folder, tmp_path / "versions", 1)
    local, folder = LocalCheckpoint(tmp_path / "local"), tmp_path / "local"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(RunFailed, match=r"local has thesis.txt, which no weight update put there"):
        local.rebuild(folders[0], 1)
    assert [path.name for path in folder.iterdir() if path.name != ".weight_sync"] == ["thesis.txt"]
    (folder / "thesis.txt").unlink()
    local.rebuild(folders[0], 1)
    (folder / "model-00009-of-00009.safetensors").write_text("mine")
    with pytest.raises(
        RunFailed, match=r"local has model-00009-of-00009.safetensors, which no weight update put there"
    ):
        local.rebuild(folders[0], 1)
    assert (folder / "model-00009-of-00009.safetensors").read_text() == "mine"
    assert local.version == 1


def test_foreign_version_folders_are_not_removed(tmp_path: Path, model_folder: Path, source: ModelSource) -> None:
    root = tmp_path / "versions"
    theirs = root / "weight_v000000"
    theirs.mkdir(parents=True)
    (theirs / "model.safetensors").write_text("theirs")
    settings, where = PublisherSettings(source, [], lambda coro: coro.close()), VersionFolders(root, model_folder)
    publisher = DeltaPublisher(settings, where, encoding=source.encoding, checksum=source.checksum)
    for version in (1, 2):
        staged = publisher._stage(version, whole=False)
        publisher._retire(staged, version, arrived=True)
    assert sorted(path.name for path in root.iterdir()) == ["weight_v000000", "weight_v000002"]
    with pytest.raises(OSError, match="not empty"):
        publisher._stage(0, whole=True)
    assert (theirs / "model.safetensors").read_text() == "theirs"
