"""The delta format: documented bytes, exact encoding and decoding, and exact undo."""

from __future__ import annotations

import json
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from safetensors.numpy import load_file

from slime.config import Config
from slime.errors import UserError
from slime.models.delta import apply as apply_module
from slime.models.delta.apply import (
    ChecksumMismatch,
    PartiallyApplied,
    _apply_on_host,
    apply_on_device,
    bytes_of,
    tensor_checksums,
)
from slime.models.delta.blob import (
    BadBlob,
    Blob,
    TensorDiff,
    changed_positions,
    checksum_function,
    encode,
    sum64_of_tensors,
)
from slime.models.delta.folder import BadDelta, DeltaIndex, DeltaPart, delta_entries, join_parts, read_index, write_part
from slime.train.weight_export.delta import PublishedWeights
from slime.weights.transport import with_delta_checksum

ENCODINGS = ("xor", "overwrite", "sparse")


def versions(size: int, share: float = 0.02, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size, dtype=np.uint8)
    new = np.where(rng.random(size) < share, rng.integers(0, 256, size, dtype=np.uint8), old).astype(np.uint8)
    return old, new


def test_xor_blob_is_new_xor_old_in_one_zstd_frame() -> None:
    old, new = np.array([1, 2, 3, 250], np.uint8), np.array([1, 7, 3, 5], np.uint8)
    assert zstandard.decompress(encode(TensorDiff.between(old, new), "xor").data) == bytes([0, 5, 0, 255])


def test_overwrite_blob_is_count_positions_and_values() -> None:
    old, new = np.zeros(300, np.uint8), np.zeros(300, np.uint8)
    new[[2, 299]] = [9, 8]
    expected = struct.pack("<III", 2, 2, 299) + bytes([9, 8])
    assert zstandard.decompress(encode(TensorDiff.between(old, new), "overwrite").data) == expected


def test_sparse_blob_is_count_changes_and_distances() -> None:
    old, new = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
    new[[0, 254, 509, 999]] = [9, 8, 7, 6]
    expected = struct.pack("<Q", 4) + bytes([9, 8, 7, 6]) + bytes([0, 254, 255, 0, 255, 235])
    assert zstandard.decompress(encode(TensorDiff.between(old, new), "sparse").data) == expected
    assert len(zstandard.decompress(encode(TensorDiff.between(old, old), "sparse").data)) == 8


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [1, 7, 8, 1000, 4099])
def test_apply_gives_the_new_bytes_and_undo_restores_the_old_ones(encoding: str, size: int) -> None:
    old, new = versions(size, share=0.3)
    target = old.copy()
    undo = encode(TensorDiff.between(old, new), encoding).apply(target)
    assert target.tobytes() == new.tobytes()
    undo.apply(target)
    assert target.tobytes() == old.tobytes()


def test_blobs_of_few_changes_are_small() -> None:
    old, new = versions(1_000_000, share=0.01)
    for encoding in ENCODINGS:
        assert len(encode(TensorDiff.between(old, new), encoding).data) < 0.05 * len(new)


@pytest.mark.parametrize("size", [0, 5, 64, 1003])
def test_changed_positions_match_flatnonzero(size: int) -> None:
    old, new = versions(size, share=0.2, seed=size)
    assert changed_positions(old ^ new).tolist() == np.flatnonzero(old ^ new).tolist()


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (Blob(b"no frame", "xor"), "not a zstd frame"),
        (Blob(zstandard.compress(bytes(9)), "xor"), "more than the 8"),
        (Blob(zstandard.compress(bytes(7)), "xor"), "covers 7 bytes of a tensor of 8"),
        (Blob(zstandard.compress(struct.pack("<II", 1, 8) + b"x"), "overwrite"), "names byte 8 of a tensor of 8"),
        (Blob(zstandard.compress(struct.pack("<II", 2, 1) + b"x"), "overwrite"), "not a list of positions"),
        (Blob(zstandard.compress(b"ab"), "overwrite"), "not a list of positions"),
        (Blob(zstandard.compress(struct.pack("<Q", 1) + b"x" + bytes([8])), "sparse"), "names byte 8 of a tensor of 8"),
        (
            Blob(zstandard.compress(struct.pack("<Q", 2) + b"xy" + bytes([1])), "sparse"),
            "names 1 positions for 2 changes",
        ),
        (Blob(zstandard.compress(struct.pack("<Q", 1) + b"x" + bytes([1, 255])), "sparse"), "positions for 1 changes"),
        (Blob(zstandard.compress(struct.pack("<Q", 9) + b"x"), "sparse"), "not a list of changes"),
        (Blob(zstandard.compress(b"ab"), "sparse"), "not a list of changes"),
    ],
)
def test_invalid_blob_changes_nothing(blob: Blob, reason: str) -> None:
    target = np.arange(8, dtype=np.uint8)
    with pytest.raises(BadBlob, match=reason):
        blob.apply(target)
    assert target.tolist() == list(range(8))


def plain_sum64(data: bytes) -> str:
    """Compute sum64 as documented, one word at a time."""
    total, mask = 0, 2**64 - 1
    padded = data + bytes(-len(data) % 8)
    for index in range(len(padded) // 8):
        x = int.from_bytes(padded[8 * index :][:8], "little") + (index + 1) * 0x9E3779B97F4A7C15 & mask
        for _ in range(2):
            x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & mask
        total += x
    return f"{total & mask:016x}"


@pytest.mark.parametrize("size", [0, 1, 8, 4099, 2**16])
def test_sum64_is_the_same_on_bytes_and_on_tensors(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("slime.models.delta.blob._CHUNK", 1000)
    monkeypatch.setattr("slime.models.delta.blob._HOST_CHUNK", 300)
    data = versions(size, seed=size)[0]
    expected = plain_sum64(data.tobytes())
    assert checksum_function("sum64")(data) == expected
    assert sum64_of_tensors([torch.from_numpy(data), torch.from_numpy(data).view(size, 1)]) == [expected, expected]


def test_sum64_detects_a_flipped_bit_and_swapped_words() -> None:
    data = versions(800)[0]
    other, swapped = data.copy(), data.copy()
    other[399] ^= 0x80
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    assert len({checksum_function("sum64")(one) for one in (data, other, swapped)}) == 3


def test_checksums_match_reference_values() -> None:
    data = np.frombuffer(b"slime", np.uint8)
    assert checksum_function("xxh3-128")(data) == xxhash.xxh3_128_hexdigest(b"slime")
    assert checksum_function("adler32")(data) == "066e021b"
    assert checksum_function("sum64")(data) == plain_sum64(b"slime")
    blake3 = "619e93cffbe1d1200b0fce0be0cbfc52f86a7b9664a2db73df453c842df4a45c"
    assert checksum_function("blake3")(data) == blake3
    with pytest.raises(UserError, match="md5"):
        checksum_function("md5")


@pytest.mark.parametrize(
    ("chosen", "device", "backend", "expected"),
    [
        (None, "cuda", "embedded", "sum64"),
        (None, "cuda", "sglang", "xxh3-128"),
        (None, "cpu", "embedded", "xxh3-128"),
        ("adler32", "cuda", "embedded", "adler32"),
        ("sum64", "cpu", "sglang", "sum64"),
    ],
)
def test_default_delta_checksum_depends_on_device_and_engine(
    chosen: str | None, device: str, backend: str, expected: str
) -> None:
    config = Config(update_weight_mode="delta", update_weight_delta_checksum=chosen)
    assert with_delta_checksum(config, device, backend).update_weight_delta_checksum == expected
    whole = Config(update_weight_delta_checksum=chosen)
    assert with_delta_checksum(whole, device, backend) is whole


def test_missing_blake3_package_raises_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(UserError, match="pip install blake3"):
        checksum_function("blake3")


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    written = tmp_path / "rank-00000.safetensors"
    write_part(written, {"a": bytes([0, 1, 2])}, {"a": "c0ffee"})
    parts = [DeltaPart(path=str(written), names=["a"]), DeltaPart()]
    files = join_parts(tmp_path, parts, version=123, base_version=122, encoding="xor", checksum="xxh3-128")
    assert [file.name for file in files] == ["model-00000-of-00001.safetensors", "model.safetensors.index.json"]
    return tmp_path


def test_delta_folder_has_the_documented_layout(delta: Path) -> None:
    index = json.loads((delta / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "version": "000123",
        "base_version": "000122",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    assert index["weight_map"] == {"a": "model-00000-of-00001.safetensors"}
    assert load_file(delta / "model-00000-of-00001.safetensors")["a"].tolist() == [0, 1, 2]


def test_delta_folder_is_read_back(delta: Path) -> None:
    index = read_index(delta)
    assert index == DeltaIndex(123, 122, "xor", "zstd", "xxh3-128", {"a": "model-00000-of-00001.safetensors"})
    [entry] = delta_entries(delta, index)
    assert (entry.name, entry.read(), entry.checksum) == ("a", bytes([0, 1, 2]), "c0ffee")


def test_whole_weights_have_no_delta_index(tmp_path: Path) -> None:
    assert read_index(tmp_path) is None
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1}, "weight_map": {}}')
    assert read_index(tmp_path) is None


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("version", "x", "not the index"),
        ("delta_encoding", "rle", "unknown encoding or compression"),
        ("compression_format", "lz4", "unknown encoding or compression"),
    ],
)
def test_unknown_delta_index_is_rejected(delta: Path, field: str, value: str, reason: str) -> None:
    path = delta / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"][field] = value
    path.write_text(json.dumps(index))
    with pytest.raises(BadDelta, match=reason):
        read_index(delta)


def test_missing_corrupt_or_outside_delta_file_is_rejected(delta: Path) -> None:
    index = read_index(delta)
    assert index is not None
    (delta / "model-00000-of-00001.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(BadDelta, match="not a safetensors file"):
        list(delta_entries(delta, index))
    (delta / "model-00000-of-00001.safetensors").unlink()
    with pytest.raises(BadDelta, match="has no file"):
        list(delta_entries(delta, index))
    outside = DeltaIndex(123, 122, "xor", "zstd", "xxh3-128", {"a": "../secret.safetensors"})
    with pytest.raises(BadDelta, match="has no file"):
        list(delta_entries(delta, outside))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum", ["sum64", "xxh3-128"])
def test_device_apply_is_in_place_and_undone_on_failure(tmp_path: Path, encoding: str, checksum: str) -> None:
    """Covers a contiguous tensor, a transposed part of another tensor, and one of odd size."""
    generator = torch.Generator().manual_seed(3)
    fused = torch.randn(6, 4, generator=generator)
    targets = {
        "whole": torch.randn(5, 7, generator=generator).bfloat16(),
        "part": fused.T[1:3],
        "odd": torch.arange(13, dtype=torch.uint8),
    }
    published = PublishedWeights()
    published.keep(targets)
    before = {name: tensor.clone() for name, tensor in targets.items()}
    trained = {name: tensor.clone() for name, tensor in targets.items()}
    trained["whole"][2, 3] += 1
    trained["part"][1, ::2] = -9.5
    trained["odd"][12] = 200
    changes = dict(published.changes(trained))
    blobs = {name: encode(one, encoding).data for name, one in changes.items()}
    write_part(tmp_path / "rank", blobs, tensor_checksums(trained.items(), checksum))
    part = DeltaPart(path=str(tmp_path / "rank"), names=list(blobs))
    join_parts(tmp_path, [part], version=1, base_version=0, encoding=encoding, checksum=checksum)
    index = read_index(tmp_path)
    assert index is not None
    entries = list(delta_entries(tmp_path, index))
    apply_on_device(targets, entries, index)
    assert all(torch.equal(targets[name], trained[name]) for name in targets)
    assert torch.equal(fused[::2, 2], torch.full((3,), -9.5)), "the part is still a part"

    for name, tensor in before.items():
        targets[name].copy_(tensor)
    targets["odd"][0] ^= 1
    damaged = {name: tensor.clone() for name, tensor in targets.items()}
    with pytest.raises(ChecksumMismatch, match="odd has checksum"):
        apply_on_device(targets, entries, index)
    assert all(torch.equal(targets[name], damaged[name]) for name in targets), "what does not fit is undone"


@pytest.mark.parametrize("apply", [apply_on_device, _apply_on_host], ids=["device", "host"])
@pytest.mark.parametrize("fails", ["before_second_write", "within_second_write", "checksum", "every_write_after"])
def test_failure_at_a_later_tensor_restores_all_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apply: Any, fails: str
) -> None:
    """Simulates CUDA out-of-memory errors. HalfApplied is raised if the old bytes cannot be restored."""
    targets = {name: torch.arange(24.0).view(4, 6).T for name in ("a", "b", "c")}  # not contiguous: written by copying
    before = {name: tensor.clone() for name, tensor in targets.items()}
    trained = {name: tensor + 1 for name, tensor in targets.items()}
    blobs = {n: encode(TensorDiff.between(bytes_of(before[n]), bytes_of(trained[n])), "xor").data for n in targets}
    write_part(tmp_path / "rank", blobs, tensor_checksums(trained.items()))
    part = DeltaPart(path=str(tmp_path / "rank"), names=list(blobs))
    join_parts(tmp_path, [part], version=1, base_version=0, encoding="xor", checksum="xxh3-128")
    index = read_index(tmp_path)
    assert index is not None
    writes, lock = [0], threading.Lock()
    name = "_put" if apply is apply_on_device else "put_bytes"
    real = getattr(apply_module, name)

    def write(target: torch.Tensor, *rest: Any) -> None:
        with lock:
            writes[0] += 1
            count = writes[0]
        if (fails == "before_second_write" and count == 2) or (fails == "every_write_after" and count > 1):
            raise torch.OutOfMemoryError("on purpose")
        real(target, *rest)
        if fails == "within_second_write" and count == 2:
            raise torch.OutOfMemoryError("on purpose")

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(apply_module, name, write)
    if fails == "checksum":
        monkeypatch.setattr(apply_module, "tensor_checksums", out_of_memory)
        monkeypatch.setattr(apply_module, "checksum_function", lambda kind: out_of_memory)
    expected = PartiallyApplied if fails == "every_write_after" else torch.OutOfMemoryError
    with pytest.raises(expected, match="on purpose"):
        apply(targets, list(delta_entries(tmp_path, index)), index)
    if fails != "every_write_after":
        assert all(torch.equal(targets[one], before[one]) for one in targets)


def test_published_weights_follow_taken_changes() -> None:
    published, generator = PublishedWeights(), torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(size, generator=generator).bfloat16() for name, size in (("a", 700), ("b", 3))}
    published.keep(tensors)
    assert dict(published.changes(tensors)) == {}
    tensors["a"][[0, 699]] += 1
    [(name, changes)] = published.changes(tensors)
    assert (name, changes.size, len(changes.positions) <= 4) == ("a", 1400, True)
    assert published.whole("a") is not None
    assert not torch.equal(published.whole("a"), tensors["a"]), "not before it is taken"
    published.take(name, changes)
    assert torch.equal(published.whole("a"), tensors["a"])
    assert dict(published.changes(tensors)) == {}
    with pytest.raises(RuntimeError, match="has other tensors than in the last update"):
        list(published.changes({"a": tensors["a"]}))
