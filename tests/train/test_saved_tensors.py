"""Tests that tensor parts written by any number of ranks are read in any other sharding, and damage is detected."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slime.errors import UserError
from slime.models.saving import NOTES
from slime.train.checkpoints import rank_files as parts_module
from slime.train.checkpoints.rank_files import SavedPart, write_parts
from slime.train.checkpoints.reader import SavedTensors

SHAPES = {
    "model.layers.10.up.weight": (7, 3),
    "model.layers.9.experts": (4, 5, 2),
    "model.norm.weight": (5,),
    "counter": (),
    "none": (0, 4),
}
CUTS = [(1, 1), (2, 1), (3, 1), (8, 1), (1, 2), (2, 3)]
"""Number of ranks along the first and the second dimension."""


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def blocks(shape: Sequence[int], cut: tuple[int, int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield offset and slices of every rank's block in rank order; blocks beyond the last row are empty."""
    for place in itertools.product(*map(range, cut)):
        chosen = []
        for size, count, index in zip(shape, cut, place, strict=False):
            step = -(-size // count)
            chosen.append((min(index * step, size), min((index + 1) * step, size)))
        chosen += [(0, size) for size in shape[2:]]
        yield tuple(begin for begin, _ in chosen), tuple(slice(*pair) for pair in chosen)


def save(folder: Path, whole: dict[str, torch.Tensor], cut: tuple[int, int], kind: str = "model") -> None:
    """Write each block once, on the first rank that has it."""
    seen: set[tuple[object, ...]] = set()
    for rank in range(math.prod(cut)):
        own = []
        for name, tensor in whole.items():
            offset, slices = list(blocks(tensor.shape, cut))[rank]
            if (name, offset) not in seen and (tensor[slices].numel() or rank == 0):
                seen.add((name, offset))
                own.append(SavedPart(kind, name, tensor[slices], tuple(tensor.shape), offset))
        write_parts(folder, rank, own)


@pytest.mark.parametrize("written", CUTS)
def test_tensors_written_in_any_sharding_are_read_in_any_other(written: tuple[int, int], tmp_path: Path) -> None:
    whole = tensors()
    save(tmp_path, whole, written)
    save(tmp_path, {"other": torch.zeros(3)}, (1, 1), kind="optim")
    saved = SavedTensors(tmp_path, "model")
    assert saved.names == [
        "counter",
        "model.layers.9.experts",
        "model.layers.10.up.weight",
        "model.norm.weight",
        "none",
    ]
    assert {name: saved.shape(name) for name in saved.names} == SHAPES
    for name, tensor in saved:
        assert torch.equal(tensor, whole[name]), name
        assert tensor.dtype == torch.float32
    for cut in CUTS:
        for name, tensor in whole.items():
            for offset, slices in blocks(tensor.shape, cut):
                target = torch.full_like(tensor[slices], torch.nan)
                saved.read_into(name, target, offset)
                assert torch.equal(target, tensor[slices]), (name, cut, offset)


def test_reads_whole_tensors_of_format_1(tmp_path: Path) -> None:
    whole = tensors()
    save_file(whole, tmp_path / "model-00001.safetensors", metadata={"format": "pt"})
    saved = SavedTensors(tmp_path, "model")
    assert all(torch.equal(saved[name], tensor) for name, tensor in whole.items())
    target = torch.empty(2, 3, dtype=torch.float64)
    saved.read_into("model.layers.10.up.weight", target, (4, 0))
    assert torch.equal(target, whole["model.layers.10.up.weight"][4:6].double())


def test_parts_keep_their_dtype_and_files_are_split_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "SHARD_BYTES", 60)
    whole = tensors(torch.bfloat16)
    heard: list[str] = []
    files = write_parts(
        tmp_path,
        3,
        (SavedPart("model", n, t, tuple(t.shape), (0,) * t.dim()) for n, t in whole.items()),
        added=heard.append,
    )
    assert heard == list(whole)
    assert sorted(files) == [f"model-r00003-{i:05d}.safetensors" for i in (1, 2, 3)]
    assert files == {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    saved = SavedTensors(tmp_path, "model")
    assert all(torch.equal(saved[name], t) and saved[name].dtype == torch.bfloat16 for name, t in whole.items())


def test_part_on_host_is_a_copy() -> None:
    tensor = torch.zeros(3)
    part = SavedPart("model", "x", tensor, (3,), (0,)).on_host()
    tensor += 1
    assert part.tensor.tolist() == [0, 0, 0]


def test_reads_more_files_than_the_open_file_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.train.checkpoints.reader.OPEN_FILES", 2)
    save(tmp_path, tensors(), (8, 1))
    saved = SavedTensors(tmp_path, "model")
    assert all(torch.equal(tensor, tensors()[name]) for name, tensor in saved)
    assert len(saved._open) == 2


def damage_message(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        for _ in SavedTensors(folder, "model"):
            pass
    assert str(caught.value).startswith(f"checkpoint {folder} ")
    return str(caught.value)


def test_missing_or_damaged_parts_raise_errors(tmp_path: Path) -> None:
    save(tmp_path, tensors(), (2, 1))
    file = tmp_path / "model-r00001-00001.safetensors"
    content = file.read_bytes()
    file.unlink()
    assert "has 20 of 40 numbers of model.layers.9.experts: it is damaged, choose another iteration" in damage_message(
        tmp_path
    )
    file.write_bytes(content[:-1])
    assert "cannot be read (" in damage_message(tmp_path)
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"lacks model\.layers\.3: it is damaged"):
        SavedTensors(tmp_path, "model").read_into("model.layers.3", torch.empty(1))
    with pytest.raises(ValueError, match="has no block"):
        SavedTensors(tmp_path, "model").read_into("model.norm.weight", torch.empty(3), (3,))


@pytest.mark.parametrize(
    "note",
    [
        "no JSON",
        "[]",
        "{}",
        '{"model.norm.weight": {"shape": [5]}}',
        '{"model.norm.weight": {"shape": [5], "offset": ["a"]}}',
        '{"model.norm.weight": {"shape": [5, 1], "offset": [0]}}',
        '{"model.norm.weight": {"shape": [5], "offset": [4]}}',
        '{"model.norm.weight": {"shape": [5], "offset": [-1]}}',
        '{"model.norm.weight": {"shape": [6], "offset": [3]}}',
    ],
)
def test_rejects_invalid_part_header(tmp_path: Path, note: str) -> None:
    save(tmp_path, {"model.norm.weight": torch.ones(5)}, (2, 1))
    file = tmp_path / "model-r00001-00001.safetensors"
    save_file(load_file(file), file, metadata={NOTES: note})
    assert "has a header in model-r00001-00001.safetensors that cannot be read" in damage_message(tmp_path)


def test_part_header_is_plain_json(tmp_path: Path) -> None:
    save(tmp_path, {"model.norm.weight": torch.ones(5)}, (2, 1))
    with safe_open(tmp_path / "model-r00001-00001.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()[NOTES]) == {"model.norm.weight": {"shape": [5], "offset": [3]}}
