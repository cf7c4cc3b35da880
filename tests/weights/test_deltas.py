"""The delta format: bytes that anybody can write or read by hand, exact both ways, and undone exactly."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from safetensors.numpy import load_file

from slime.errors import UserError
from slime.models.delta.blob import BadBlob, Blob, changed_positions, checksum_function, encode
from slime.models.delta.folder import BadDelta, DeltaIndex, DeltaPart, delta_entries, join_parts, read_index, write_part

ENCODINGS = ("xor", "overwrite")


def versions(size: int, share: float = 0.02, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size, dtype=np.uint8)
    new = np.where(rng.random(size) < share, rng.integers(0, 256, size, dtype=np.uint8), old).astype(np.uint8)
    return old, new


def test_an_xor_blob_is_new_xor_old_in_one_zstd_frame() -> None:
    old, new = np.array([1, 2, 3, 250], np.uint8), np.array([1, 7, 3, 5], np.uint8)
    assert zstandard.decompress(encode(old ^ new, new, "xor").data) == bytes([0, 5, 0, 255])


def test_an_overwrite_blob_is_a_count_positions_and_values() -> None:
    old, new = np.zeros(300, np.uint8), np.zeros(300, np.uint8)
    new[[2, 299]] = [9, 8]
    expected = struct.pack("<III", 2, 2, 299) + bytes([9, 8])
    assert zstandard.decompress(encode(old ^ new, new, "overwrite").data) == expected


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", [1, 7, 8, 1000, 4099])
def test_applying_gives_the_new_bytes_and_undoing_the_old(encoding: str, size: int) -> None:
    old, new = versions(size, share=0.3)
    target = old.copy()
    undo = encode(old ^ new, new, encoding).apply(target)
    assert target.tobytes() == new.tobytes()
    undo.apply(target)
    assert target.tobytes() == old.tobytes()


def test_few_changes_make_small_blobs() -> None:
    old, new = versions(1_000_000, share=0.01)
    for encoding in ENCODINGS:
        assert len(encode(old ^ new, new, encoding).data) < 0.05 * len(new)


@pytest.mark.parametrize("size", [0, 5, 64, 1003])
def test_changed_positions_are_those_of_a_plain_search(size: int) -> None:
    old, new = versions(size, share=0.2, seed=size)
    assert changed_positions(old ^ new).tolist() == np.flatnonzero(old ^ new).tolist()


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (Blob(b"no frame", "xor"), "not a zstd frame"),
        (Blob(zstandard.compress(bytes(9)), "xor"), "more than the 8"),
        (Blob(zstandard.compress(bytes(7)), "xor"), "covers 7 bytes of a tensor of 8"),
        (Blob(zstandard.compress(struct.pack("<II", 1, 8) + b"x"), "overwrite"), "names byte 8 of a tensor of 8"),
        (Blob(zstandard.compress(struct.pack("<II", 2, 1) + b"x"), "overwrite"), "no list of positions"),
        (Blob(zstandard.compress(b"ab"), "overwrite"), "no list of positions"),
    ],
)
def test_a_blob_that_does_not_fit_changes_nothing(blob: Blob, reason: str) -> None:
    target = np.arange(8, dtype=np.uint8)
    with pytest.raises(BadBlob, match=reason):
        blob.apply(target)
    assert target.tolist() == list(range(8))


def test_checksums_are_the_known_functions() -> None:
    data = np.frombuffer(b"slime", np.uint8)
    assert checksum_function("xxh3-128")(data) == xxhash.xxh3_128_hexdigest(b"slime")
    assert checksum_function("adler32")(data) == "066e021b"
    blake3 = "619e93cffbe1d1200b0fce0be0cbfc52f86a7b9664a2db73df453c842df4a45c"
    assert checksum_function("blake3")(data) == blake3
    with pytest.raises(UserError, match="md5"):
        checksum_function("md5")


def test_blake3_without_its_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_version_folder_is_written_as_others_read_it(delta: Path) -> None:
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


def test_a_version_folder_is_read_back(delta: Path) -> None:
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
        ("delta_encoding", "rle", "not known"),
        ("compression_format", "lz4", "not known"),
    ],
)
def test_an_index_that_is_not_ours_is_refused(delta: Path, field: str, value: str, reason: str) -> None:
    path = delta / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"][field] = value
    path.write_text(json.dumps(index))
    with pytest.raises(BadDelta, match=reason):
        read_index(delta)


def test_a_file_that_is_missing_or_elsewhere_is_refused(delta: Path) -> None:
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
