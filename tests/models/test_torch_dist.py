"""Megatron's distributed checkpoints, read and written without Megatron. With it: tests/megatron/test_torch_dist.py."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slime.errors import UserError
from slime.models.dequantized import plain_sources
from slime.models.safetensors_io import open_weights
from slime.models.tensor_sources import read_whole
from slime.models.torch_dist.hugging_face import checkpoint_sources, model_entries
from slime.models.torch_dist.index import TorchDist, find_parameter
from slime.models.torch_dist.writing import write_release
from tests.family_models import FAMILY_MODELS, make_family_folder
from tests.tiny_models import make_model_folder

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
CALLED: list[str] = []


def call(*words: str) -> None:
    CALLED.extend(words)


class MaliciousPickle:
    def __reduce__(self) -> Any:
        return call, ("called",)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    return make_model_folder(path, request.param, **FAMILIES[request.param])


def write_checkpoint(model: Path, target: Path) -> Path:
    sources = plain_sources(model)
    entries, alike = model_entries(model, sources)
    return write_release(sources, entries, target, dtype=torch.float32, alike=alike) / "release"


def test_model_folder_round_trip_is_exact(model: Path, tmp_path: Path) -> None:
    before, back = open_weights(model), checkpoint_sources(model, write_checkpoint(model, tmp_path / "out"))
    assert set(back) == set(before.names)
    for name in before.names:
        assert torch.equal(read_whole(back[name]), before[name]), name
    rows = before["model.embed_tokens.weight"][3:7, 8:]
    assert torch.equal(back["model.embed_tokens.weight"].read((slice(3, 7), slice(8, 64))), rows)


@pytest.mark.parametrize("case", FAMILY_MODELS)
def test_round_trip_of_every_family_is_exact(case: str, tmp_path: Path) -> None:
    model = make_family_folder(tmp_path / "model", case)
    before, back = open_weights(model), checkpoint_sources(model, write_checkpoint(model, tmp_path / "out"))
    assert set(back) == set(before.names)
    assert all(torch.equal(read_whole(back[name]), before[name]) for name in before.names)


def test_torch_reads_the_written_checkpoint(model: Path, tmp_path: Path) -> None:
    """Reads with torch's own reader as an independent reference."""
    folder = write_checkpoint(model, tmp_path / "out")
    checkpoint = TorchDist(folder)
    loaded = {key: torch.empty(checkpoint.source(key).shape) for key in checkpoint.keys}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    for key, tensor in loaded.items():
        assert torch.equal(tensor, read_whole(checkpoint.source(key))), key
    embedding = loaded["embedding.word_embeddings.weight"]
    assert embedding.shape == (384, 64)  # 320 tokens, padded as Megatron does
    assert not embedding[320:].any()


def test_parameters_are_found_under_every_key_layout(tmp_path: Path) -> None:
    layers, experts = torch.randn(3, 4, 5), torch.randn(3, 2, 6, 5)
    pieces = {"decoder.layers.1.mlp.linear_fc1.weight_w": torch.randn(2, 3)}
    pieces["decoder.layers.1.mlp.linear_fc1.weight_v"] = torch.randn(2, 3)
    single = torch.randn(2, 2)
    saved = {
        "decoder.layers.self_attention.linear_proj.weight": layers,
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": experts,
        "decoder.layers.4.mlp.experts.experts.linear_fc2.weight": experts[0],
        "decoder.layers.5.mlp.experts.experts.1.linear_fc2.weight": single,
        **pieces,
    }
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    checkpoint = TorchDist(tmp_path / "saved")

    def found(name: str) -> torch.Tensor:
        source = find_parameter(checkpoint, name)
        assert source is not None
        return read_whole(source)

    assert torch.equal(found("decoder.layers.2.self_attention.linear_proj.weight"), layers[2])
    assert torch.equal(found("decoder.layers.2.mlp.experts.linear_fc1.weight1"), experts[2, 1])
    assert torch.equal(found("decoder.layers.4.mlp.experts.linear_fc2.weight1"), experts[0, 1])
    assert torch.equal(found("decoder.layers.5.mlp.experts.linear_fc2.weight1"), single)
    assert torch.equal(found("decoder.layers.1.mlp.linear_fc1.weight"), torch.cat(list(pieces.values())))
    for absent in ("decoder.layers.3.self_attention.linear_proj.weight", "decoder.layers.0.mlp.linear_fc2.weight"):
        assert find_parameter(checkpoint, absent) is None


def test_pickles_in_a_checkpoint_cannot_call_functions(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(MaliciousPickle()))
    with pytest.raises(UserError, match=r"names tests.models.test_torch_dist.call, which no index needs"):
        TorchDist(tmp_path)
    block = pickle.dumps(MaliciousPickle())
    (tmp_path / "__0_0.distcp").write_bytes(block)
    write_index(tmp_path, length=len(block))
    with pytest.raises(UserError, match=r"w in .*__0_0.distcp is not a tensor"):
        read_whole(TorchDist(tmp_path).source("w"))
    assert CALLED == []


def test_rejects_damaged_checkpoints(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.ones(2, 3), buffer)
    (tmp_path / "__0_0.distcp").write_bytes(buffer.getvalue()[:-10])
    for changes, said in (
        ({"length": len(buffer.getvalue())}, "ends before w does"),
        ({"path": "../other"}, "has a block outside the folder"),
        ({"path": "/etc/passwd"}, "has a block outside the folder"),
        ({"size": (9, 3)}, "which is outside"),
        ({"shape": (4, 3)}, "do not cover its shape"),
        ({"begin": -1}, "are not sizes"),
    ):
        write_index(tmp_path, **changes)
        with pytest.raises(UserError, match=said):
            read_whole(TorchDist(tmp_path).source("w"))
    (tmp_path / "__0_0.distcp").write_bytes(buffer.getvalue())
    write_index(tmp_path, size=(3, 2), shape=(3, 2), length=len(buffer.getvalue()))
    with pytest.raises(UserError, match="not what the index says"):
        read_whole(TorchDist(tmp_path).source("w"))
    (tmp_path / ".metadata").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(UserError, match="is not an index of a torch_dist checkpoint"):
        TorchDist(tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(UserError, match="No such file"):
        TorchDist(tmp_path)


def test_rejects_the_checkpoint_of_another_model(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model")
    narrow = make_model_folder(tmp_path / "narrow", hidden_size=32)
    deeper = make_model_folder(tmp_path / "deeper", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"is \(320, 32\) in .*, but \(320, 64\) by the model folder"):
        checkpoint_sources(model, write_checkpoint(narrow, tmp_path / "a"))
    with pytest.raises(UserError, match=r"lacks decoder.layers.2.* it is a checkpoint of another model"):
        checkpoint_sources(deeper, write_checkpoint(model, tmp_path / "b"))


def write_index(
    folder: Path,
    *,
    path: str = "__0_0.distcp",
    begin: int = 0,
    length: int = 10,
    shape: tuple[int, ...] = (2, 3),
    size: tuple[int, ...] | None = None,
) -> None:
    """Writes an index with one tensor `w`."""
    block = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size(size or (2, 3)))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), [block])
    places = {MetadataIndex("w", (0, 0)): _StorageInfo(path, begin, length)}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"w": tensor}, None, places)))
