"""Arrays in shared memory: written once, read in place, freed with the last reference."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.cluster.memory import arena as arenas
from slime.cluster.memory.arena import SharedArena, SharedMemoryFull, read_places
from slime.cluster.rpc.messages import DamagedMessage
from tests.small_disk import small_disk

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 1000, 5000).astype(np.int32)
ARRAYS = [
    IDS,
    np.arange(7, dtype=np.int8),
    RNG.random((300, 3, 2)),
    np.zeros(0, dtype=np.float32),
    IDS[::-1],
    np.broadcast_to(np.int8(1), (100,)),
]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[SharedArena]:
    own = SharedArena(tmp_path)
    yield own
    own.close()
    assert list(tmp_path.iterdir()) == []


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*") if path.suffix != ".lock")


def read(message: dict[str, Any], like: list[np.ndarray]) -> list[np.ndarray]:
    found = read_places(message, [array.nbytes for array in like])
    return [one.view(array.dtype).reshape(array.shape) for one, array in zip(found, like, strict=True)]


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.flags.aligned
        np.testing.assert_array_equal(one, other)


def test_kept_arrays_are_read_in_place(tmp_path: Path, arena: SharedArena) -> None:
    kept = arena.keep(ARRAYS)
    assert_same(kept, ARRAYS)
    assert files(tmp_path) == ["kept-0"]
    with arena.publish_arrays(kept) as places:
        assert files(tmp_path) == ["kept-0"], "nothing is written a second time"
        message = places.part(0, len(kept))
        read_by_one, read_by_other = read(message, ARRAYS), read(message, ARRAYS)
    assert_same(read_by_one, ARRAYS)
    read_by_one[0][:] = -1
    assert_same(read_by_other, ARRAYS)
    assert_same(kept, ARRAYS)


def test_lent_arrays_that_are_not_kept_use_temporary_files(tmp_path: Path, arena: SharedArena) -> None:
    (kept,) = arena.keep([IDS])
    lent = [kept[1:], kept, kept[::-1], kept.astype(np.int64), kept.reshape(50, 100), *ARRAYS]
    expected = [IDS[1:], IDS, IDS[::-1], IDS.astype(np.int64), IDS.reshape(50, 100), *ARRAYS]
    with arena.publish_arrays(lent) as places:
        assert len(files(tmp_path)) > 1
        found = read(places.part(0, len(lent)), expected)
        assert_same(read(places.part(2, 4), expected[2:4]), expected[2:4])
    assert files(tmp_path) == ["kept-0"]
    assert_same(found, expected)


def test_readers_see_writes_into_kept_arrays(arena: SharedArena) -> None:
    (kept,) = arena.keep([IDS])
    kept[0] = 7
    with arena.publish_arrays([kept]) as places:
        assert read(places.part(0, 1), [IDS])[0][0] == 7


def test_file_is_deleted_with_the_last_of_its_arrays(
    tmp_path: Path, arena: SharedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "SMALLEST", 50_000)  # two arrays per file
    first, second, third = (arena.keep([IDS])[0] for _ in range(3))
    assert files(tmp_path) == ["kept-0", "kept-1"]
    view = first[5:9]
    del first, second
    gc.collect()
    assert files(tmp_path) == ["kept-0", "kept-1"]
    np.testing.assert_array_equal(view, IDS[5:9])
    del view
    gc.collect()
    assert files(tmp_path) == ["kept-1"]
    np.testing.assert_array_equal(third, IDS)


def test_many_kept_arrays_use_few_files(tmp_path: Path, arena: SharedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SMALLEST", IDS.nbytes)
    kept = [arena.keep([IDS])[0] for _ in range(400)]
    assert len(files(tmp_path)) < 100
    assert all(np.array_equal(one, IDS) for one in kept)


def test_kept_arrays_outlive_the_folder(tmp_path: Path) -> None:
    arena = SharedArena(tmp_path)
    (kept,) = arena.keep([IDS])
    arena.close()
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(kept, IDS)
    assert arena.keep([IDS])[0] is IDS, "somebody may still be making samples when a run ends"
    assert list(tmp_path.iterdir()) == []


def test_arena_leaves_part_of_the_memory_free(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", size="512k") as disk:
        arena = SharedArena(disk)
        kept: list[np.ndarray] = []
        refused = None
        while refused is None:
            try:
                kept += arena.keep([IDS])
            except SharedMemoryFull as error:
                refused = str(error)
        assert refused == f"{disk} has 0.00 GiB free, and 0.00 GiB are kept there already"
        assert sum(array.nbytes for array in kept) <= 256 * 1024
        assert shutil.disk_usage(disk).free >= 200 * 1024
        assert all(np.array_equal(one, IDS) for one in kept)
        kept.clear()
        assert_same(arena.keep([IDS]), [IDS])
        arena.close()


def test_small_memory_can_be_filled_repeatedly(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", size="512k") as disk:
        arena = SharedArena(disk)
        for _ in range(5):
            kept = [arena.keep([IDS[:1000]])[0] for _ in range(20)]
            assert all(np.array_equal(one, IDS[:1000]) for one in kept)
            del kept
        arena.close()


def test_full_disk_raises_no_room_and_earlier_arrays_stay_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "SMALLEST", 64 * 1024)
    plenty = type("Usage", (), {"free": 2**40, "total": 2**40})
    with small_disk(tmp_path / "small", size="128k") as disk:
        monkeypatch.setattr("slime.cluster.memory.arena.shutil.disk_usage", lambda _: plenty)
        arena = SharedArena(disk)
        kept = [arena.keep([IDS])[0] for _ in range(5)]
        with pytest.raises(SharedMemoryFull, match="cannot be written"):
            arena.keep([np.zeros(200_000, np.int8)])
        assert all(np.array_equal(one, IDS) for one in kept)
        arena.close()


@pytest.mark.parametrize("damage", ["shorter", "missing"])
def test_truncated_or_missing_file_is_rejected(arena: SharedArena, damage: str) -> None:
    with arena.publish_arrays([IDS]) as places:
        message = places.part(0, 1)
        (path,) = (Path(path) for path in message["paths"].values())
        if damage == "shorter":
            path.write_bytes(path.read_bytes()[:-100])
        else:
            path.unlink()
        with pytest.raises(DamagedMessage, match=str(path)):
            read_places(message, [IDS.nbytes])
