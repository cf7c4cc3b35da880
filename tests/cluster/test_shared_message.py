"""Messages as files, mapped: the same as over a channel, private to each reader, whole or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.cluster.memory.shared_message import SharedMessage, read_message
from slime.cluster.message import DamagedMessage, Joined, pack, unpack

RNG = np.random.default_rng(0)
LARGE = RNG.integers(0, 1000, 50_000).astype(np.int32)


def written(path: Path, message: Any) -> Path:
    draft = SharedMessage(message)
    draft.write(path)
    assert path.stat().st_size == draft.size
    return path


@pytest.mark.parametrize(
    "array",
    [
        LARGE,
        LARGE.reshape(50, 1000).T,
        RNG.random(40_000, dtype=np.float32)[::-1],
        np.full(100_000, 7, dtype=np.int8),
        np.broadcast_to(np.float32(2), (300, 300)),
        np.arange(30_000, dtype=">i4"),
        np.arange(30_000).astype("datetime64[s]"),
        np.zeros((0, 3), dtype=np.uint8),
        np.array(3.5),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_come_back_the_same_and_writable(tmp_path: Path, array: np.ndarray) -> None:
    odd = np.arange(70_001, dtype=np.uint8)  # so that what follows begins anywhere
    back = read_message(written(tmp_path / "m", {"odd": odd, "x": [array], "text": "żółw", 7: None}))
    assert (back["text"], back[7]) == ("żółw", None)
    np.testing.assert_array_equal(back["odd"], odd)
    (found,) = back["x"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.flags.writeable
    assert found.flags.aligned
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    "parts",
    [
        [LARGE, LARGE[:3], LARGE[:0], LARGE[::2]],
        [LARGE, LARGE.astype(np.int64)],
        [np.ones(90_000, np.int8), np.full(2, 0.5, np.float32), np.broadcast_to(np.int8(1), (5,))],
        [np.zeros((2, 3, 4), np.uint8), np.zeros((0, 3, 4), np.uint8), np.ones((9000, 3, 4), np.uint8)],
        [LARGE[:2], LARGE[:1]],
        [LARGE[:10]] * 3000,
        [],
    ],
    ids=["strided", "int64", "float", "rows", "small", "many", "none"],
)
def test_joined_arrays_arrive_as_one(tmp_path: Path, parts: list[np.ndarray]) -> None:
    expected = np.concatenate(parts) if parts else np.empty(0)
    back = read_message(written(tmp_path / "m", Joined(parts)))
    assert (back.dtype, back.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(back, expected)
    np.testing.assert_array_equal(Joined(parts).whole(), expected)


def test_pieces_are_the_arrays_own_memory() -> None:
    parts = [LARGE, LARGE[100:40_000]]
    (buffer,) = pack({"x": Joined(parts)}).buffers
    assert all(np.shares_memory(np.asarray(piece), LARGE) for piece in buffer.pieces())
    assert unpack(pack({"x": 1}).body, []) == {"x": 1}


def test_rows_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="different shapes"):
        Joined([np.zeros((2, 3)), np.zeros((2, 4))])


def test_readers_see_neither_each_others_writes_nor_the_files_end(tmp_path: Path) -> None:
    path = written(tmp_path / "m", LARGE)
    one, other = read_message(path), read_message(path)
    path.unlink()
    one[:] = -1
    np.testing.assert_array_equal(other, LARGE)
    assert (one == -1).all()


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    path = written(tmp_path / "m", LARGE)
    with pytest.raises(FileExistsError):
        SharedMessage("other").write(path)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("kept", [0, 5, 27, 28, 60, 100_000, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path / "m", {"x": LARGE, "y": LARGE})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DamagedMessage, match=str(path)):
        read_message(path)


@pytest.mark.parametrize(("place", "value"), [(0, 0), (16, 255), (23, 1), (24, 255), (35, 1), (43, 1)])
def test_a_file_that_lies_about_its_parts_is_refused(tmp_path: Path, place: int, value: int) -> None:
    path = written(tmp_path / "m", LARGE)
    content = bytearray(path.read_bytes())
    content[place] = value
    path.write_bytes(content)
    with pytest.raises(DamagedMessage, match=str(path)):
        read_message(path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedMessage, match="cannot be read"):
        read_message(tmp_path / "none")
