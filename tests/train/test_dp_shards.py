"""Tests the transfer of shares to ranks: shared memory and channels agree, no driver copies, files are removed."""

from __future__ import annotations

import gc
import logging
import os
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.cluster.garbage_collection import gc_frozen, gc_paused
from slime.cluster.memory.arena import SharedArena
from slime.cluster.rpc.channel import Channel, channel_pair
from slime.config import Config
from slime.data.sample import Sample
from slime.train.microbatch_plan import build_schedule
from slime.train.samples.batch import make_train_batch
from slime.train.samples.dp_shards import ShardTransfer, Share, open_share, rank_shares
from tests.small_disk import small_disk


def make_samples(lengths: list[int]) -> list[Sample]:
    """Make finished samples: single-turn, multi-turn, one removed from training, and one with a list as mask."""
    rng = np.random.default_rng(0)
    samples = []
    for index, length in enumerate(lengths):
        sample = Sample(index=index, group_index=index // 2, tokens=list(range(3)), reward=float(index % 3))
        for part in range(1 + index % 3):
            told = part == 1
            sample.append_response_tokens(
                tokens=rng.integers(0, 1000, length).astype(np.int32),
                log_probs=None if told else -rng.random(length, dtype=np.float32),
                trainable=not told,
            )
        sample.status = Sample.Status.COMPLETED
        sample.train_metadata = {"weight": np.float32(index), "note": "żółw"} if index % 2 else None
        sample.compact()
        samples.append(sample)
    samples[-1].remove_sample = True
    samples[0].loss_mask = [1] * samples[0].response_length
    return samples


def shares_of(samples: list[Sample], ranks: int) -> list[Share]:
    batch = make_train_batch(Config(rollout_batch_size=4, n_samples_per_prompt=2), samples)
    batch.extra = {"own": [np.full(2, index) for index in range(len(batch))]}
    schedule = build_schedule(
        batch.total_lengths, batch.rollout_ids, num_ranks=ranks, global_batch_size=len(batch), micro_batch_size=2
    )
    return rank_shares(batch, schedule)


def through_channel(message: Any) -> Any:
    here, theirs = channel_pair()
    with here, Channel(theirs) as there:
        sender = threading.Thread(target=here.send, args=(message,))
        sender.start()
        received = there.recv(20)
        sender.join()
    return received


def assert_identical(one: Any, other: Any) -> None:
    """Assert equal values, types, dtypes and bits."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_identical(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_identical(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("finished", ["kept", "some kept", "not kept"])
@pytest.mark.parametrize("lengths", [[5, 900, 30, 7, 1, 64, 200, 3], [9000, 20_000, 70_000, 5, 40_000, 40_000, 1, 2]])
def test_share_is_identical_through_shared_memory_and_channel(
    tmp_path: Path, lengths: list[int], finished: str
) -> None:
    samples = make_samples(lengths)
    arena = SharedArena(tmp_path)
    for sample in [] if finished == "not kept" else samples[:: 1 if finished == "kept" else 2]:
        sample.keep_with(arena.keep)
    shares = shares_of(samples, ranks=3)
    with ShardTransfer(arena).given(shares, [True] * 3) as given:
        opened = [open_share(through_channel(data)) for data in given]
        assert all(data.keys() == {*share, "places"} for data, share in zip(given, shares, strict=True))
    arena.close()
    sent = [through_channel(share) for share in shares]
    for batch, data, received, share in zip(opened, given, sent, shares, strict=True):
        assert {**data, "batch": None, "places": None} == {**received, "batch": None, "places": None}
        assert_identical(batch.to_dict(), open_share(received).to_dict())
        np.testing.assert_equal(batch.to_dict(), open_share(share).to_dict())
        for place, index in enumerate(batch.sample_indices):
            np.testing.assert_array_equal(batch.tokens[place], samples[index].token_array())
            np.testing.assert_array_equal(batch.rollout_log_probs[place], samples[index].rollout_log_probs)
            mask = samples[index].loss_mask_array()
            np.testing.assert_array_equal(batch.loss_masks[place], 0 * mask if samples[index].remove_sample else mask)


def test_arrays_already_in_shared_memory_are_not_written_again(tmp_path: Path) -> None:
    samples, arena = make_samples([500] * 8), SharedArena(tmp_path)
    for sample in samples:
        sample.keep_with(arena.keep)
    with ShardTransfer(arena).given(shares_of(samples, ranks=2), [True, True]) as given:
        assert {Path(path).name for data in given for path in data["places"]["paths"].values()} == {"kept-0"}
    arena.close()


def test_ranks_get_changes_made_after_samples_were_kept(tmp_path: Path) -> None:
    """User filters and hooks may modify samples after that."""
    samples, arena = make_samples([500] * 8), SharedArena(tmp_path)
    for sample in samples:
        sample.keep_with(arena.keep)
    samples[0].tokens[5] = 12345
    samples[1].loss_mask = [0] * (samples[1].response_length - 1) + [1]
    samples[2].rollout_log_probs[0] = -0.5
    samples[3].append_response_tokens(tokens=[7], log_probs=[-0.25])
    with ShardTransfer(arena).given(shares_of(samples, ranks=2), [True, True]) as given:
        batches = [open_share(data) for data in given]
    found = {
        index: (batch.tokens[i], batch.loss_masks[i], batch.rollout_log_probs[i])
        for batch in batches
        for i, index in enumerate(batch.sample_indices)
    }
    assert found[0][0][5] == 12345
    assert (found[1][1].sum(), found[1][1][-1]) == (1, 1)
    assert found[2][2][0] == -0.5
    assert (found[3][0][-1], found[3][1][-1], found[3][2][-1]) == (7, 1, -0.25)
    for index in range(7):  # the last sample is not trained on
        np.testing.assert_array_equal(found[index][0], samples[index].tokens)
        np.testing.assert_array_equal(found[index][1], samples[index].loss_mask)
        np.testing.assert_array_equal(found[index][2], samples[index].rollout_log_probs)
    arena.close()


def test_constant_masks_take_no_space(tmp_path: Path) -> None:
    sample = Sample(index=9, tokens=[1, 2], reward=1.0)
    sample.append_response_tokens(tokens=np.zeros(100_000, np.int32), log_probs=np.zeros(100_000, np.float32))
    (share,) = shares_of([sample, make_samples([5])[0]], ranks=1)
    with ShardTransfer(SharedArena(tmp_path)).given([share], [True]) as (data,):
        assert sum(map(os.path.getsize, data["places"]["paths"].values())) < 8 * 100_000 + 5_000
        batch = open_share(data)
    masks = dict(zip(batch.sample_indices, batch.loss_masks, strict=True))
    assert (masks[9].strides, masks[9].dtype, masks[9].sum()) == ((0,), np.int8, 100_000)


def test_local_ranks_share_a_file_and_remote_ranks_get_the_share(tmp_path: Path) -> None:
    one, other = shares_of(make_samples([500] * 8), ranks=2)
    with ShardTransfer(SharedArena(tmp_path)).given([one, one, other, other], [True, True, True, False]) as given:
        assert given[0] is given[1] is not given[2]
        assert given[3] is other
        (folder,) = tmp_path.iterdir()
        assert {Path(path).parent for data in given[:3] for path in data["places"]["paths"].values()} == {folder}
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_for_remote_ranks(tmp_path: Path) -> None:
    shares = shares_of(make_samples([500] * 8), ranks=2)
    with ShardTransfer(SharedArena(tmp_path)).given(shares, [False, False]) as given:
        assert [data is share for data, share in zip(given, shares, strict=True)] == [True, True]
        assert list(tmp_path.iterdir()) == []


def test_files_are_removed_when_a_call_fails(tmp_path: Path) -> None:
    shares = shares_of(make_samples([500] * 8), ranks=2)

    def call() -> None:
        with ShardTransfer(SharedArena(tmp_path)).given(shares, [True, True]):
            assert list(tmp_path.iterdir()) != []
            raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        call()
    assert list(tmp_path.iterdir()) == []


def test_driver_does_not_copy_the_batch(tmp_path: Path) -> None:
    samples = make_samples([40_000] * 24)
    size = sum(8 * sample.total_length for sample in samples)
    tracemalloc.start()
    try:
        shares = shares_of(samples, ranks=4)
        with ShardTransfer(SharedArena(tmp_path)).given(shares, [True] * 4):
            pass
        for share in shares:
            through = threading.Thread(target=_send_and_discard, args=(share,))
            through.start()
            through.join()
        assert tracemalloc.get_traced_memory()[1] < size / 4  # a scan uses one megabyte
    finally:
        tracemalloc.stop()


def _send_and_discard(share: Share) -> None:
    """Send the share over a channel whose other end discards the data."""
    here, theirs = channel_pair()

    def drain() -> None:
        room = bytearray(1 << 16)
        while theirs.recv_into(room):
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    here.send(share)
    here.close()
    reader.join()
    theirs.close()


def test_full_shared_memory_falls_back_to_channels_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shares = shares_of(make_samples([9000] * 8), ranks=2)
    with small_disk(tmp_path / "full", size="256k") as disk, caplog.at_level(logging.WARNING):
        hand_over = ShardTransfer(SharedArena(disk))
        for _ in range(2):
            with hand_over.given(shares, [True, True]) as given:
                assert [data is share for data, share in zip(given, shares, strict=True)] == [True, True]
        assert list(disk.iterdir()) == []
    assert caplog.text.count("over sockets") == 1
    assert "full has 0.00 GiB free" in caplog.text


def test_shared_memory_full_during_write_falls_back_to_channels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, another process fills the memory between the free-space check and the write."""
    shares = shares_of(make_samples([9000] * 8), ranks=2)
    plenty = type("Usage", (), {"free": 2**40})
    monkeypatch.setattr("slime.cluster.memory.arena.shutil.disk_usage", lambda _: plenty)
    with (
        small_disk(tmp_path / "full", size="256k") as disk,
        caplog.at_level(logging.WARNING),
        ShardTransfer(SharedArena(disk)).given(shares, [True, True]) as given,
    ):
        assert [data is share for data, share in zip(given, shares, strict=True)] == [True, True]
        assert list(disk.iterdir()) == []
    assert "has no room for" in caplog.text


def test_missing_shared_memory_falls_back_to_channels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shares = shares_of(make_samples([50] * 8), ranks=2)
    arena = SharedArena(tmp_path / "missing")
    arena.clean()
    hand_over = ShardTransfer(arena)
    with caplog.at_level(logging.WARNING), hand_over.given(shares, [True, True]) as given:
        assert given == shares
    assert "missing cannot be written" in caplog.text


def test_collector_paused_restores_previous_state() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), gc_paused():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled(), "who had switched it off wants it off"
    finally:
        gc.enable()


@pytest.fixture
def _nothing_is_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("_nothing_is_frozen")
def test_old_objects_are_not_collected_during_a_run_only() -> None:
    class Node:
        pass

    old, new = Node(), Node()
    old.itself, new.itself = old, new  # type: ignore[attr-defined]
    gone = [weakref.ref(old), weakref.ref(new)]
    with gc_frozen():
        del old, new
        young = Node()
        young.itself = young  # type: ignore[attr-defined]
        gone.append(weakref.ref(young))
        del young
        gc.collect()
        assert [ref() is None for ref in gone] == [False, False, True]
        with gc_frozen():  # nested run
            pass
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
    gc.collect()
    assert [ref() is None for ref in gone] == [True, True, True]


def test_objects_frozen_by_the_caller_stay_frozen_after_a_run() -> None:
    class Node:
        pass

    gc.freeze()
    try:
        old = Node()
        old.itself = old  # type: ignore[attr-defined]
        gone = weakref.ref(old)
        with gc_frozen():
            del old
            gc.collect()
            assert gone() is not None
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
