"""Tests the carry-over of rollouts that fill no step: next batch, restart, and training exactly once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from slime.config import Config
from slime.data.sample import Sample
from slime.errors import UserError
from slime.train.processes import RankProcesses, TrainerRendezvous
from slime.train.samples.batch import TrainBatch, flatten_samples, make_train_batch
from slime.train.samples.carryover import (
    carried_path,
    load_carried,
    prepend_carried,
    remove_stale,
    save_carried,
)
from slime.train.samples.dp_shards import open_share
from slime.train.trainer_group import TrainerGroup
from tests.train.tiny_training import make_samples


def config(**changes: Any) -> Config:
    values: dict[str, Any] = {
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 3,
        "global_batch_size": 4,
        "num_steps_per_rollout": 2,
    }
    values |= {"num_rollout": 3, "dtype": "float32", "distributed_timeout_minutes": 2, "eps_clip_high": 0.2}
    return Config(**(values | changes))


def batch(seed: int = 0, groups: int = 2, **options: Any) -> TrainBatch:
    return make_train_batch(config(), flatten_samples(make_samples(groups, 3, seed=seed, **options)))


def assert_same(one: TrainBatch, other: TrainBatch) -> None:
    np.testing.assert_equal(one.to_dict(), other.to_dict())


class NoProcesses(RankProcesses):
    """Ranks without processes that record the data sent to them."""

    def __init__(self, config: Config, start: int) -> None:
        super().__init__(config, device="cpu", run_dir=Path("unused"))
        self.save = config.save
        self.begin = start
        self.sent: list[dict[str, Any]] = []

    def launch(self) -> list[TrainerRendezvous]:
        return [TrainerRendezvous()] * self.world_size

    def call(self, method: str, each: Sequence[dict[str, Any]] | None = None, /, **params: Any) -> list[Any]:
        if method == "init":
            return [{"begin": self.begin, "data_rank": 0, "data_size": 1}]
        if method == "save":
            assert self.save is not None
            folder = Path(self.save) / f"iter_{params['rollout_id']:07d}"
            folder.mkdir(parents=True)
            return [str(folder)]
        assert each is not None
        data = dict(each[0]["data"], batch=open_share(each[0]["data"]).to_dict())
        data.pop("places", None)
        self.sent.append(data)
        perf = {"perf/data_preprocess_time": 0.0, "perf/train_time": 0.0}
        metrics = [{"train/step": 0.0}] * len(data["steps"])
        return [{"metrics": metrics, "rollout_metrics": perf, "logged": [], "warnings": [], "is_skipped": False}]


class RecordingGroup(TrainerGroup):
    """A trainer group without processes; `sent` is the data sent to its rank."""

    def __init__(self, config: Config, start: int = 0) -> None:
        super().__init__(config, device="cpu", run_dir="unused")
        self.processes = NoProcesses(config, start)
        self.sent = self.processes.sent

    def trained_tokens(self) -> list[tuple[int, ...]]:
        return [tuple(tokens) for data in self.sent for tokens in data["batch"]["tokens"]]

    def rollouts_per_step(self) -> list[list[int]]:
        return [[step["num_rollouts"] for step in data["steps"]] for data in self.sent]


def tokens_of(rollouts: Sequence[list[list[Sample]]]) -> list[tuple[int, ...]]:
    return [tuple(sample.tokens) for groups in rollouts for sample in flatten_samples(groups)]


def test_rollouts_that_fill_no_step_go_first_in_the_next_batch() -> None:
    group = RecordingGroup(config())
    rollouts = [make_samples(3, 3, seed=seed) for seed in range(3)]
    results = [group.train(i, samples, last=i == 2) for i, samples in enumerate(rollouts)]
    assert group.rollouts_per_step() == [[4, 4], [4, 4], [4, 4, 3]]
    assert [r.rollout_metrics["rollout/carried_rollouts"] for r in results] == [1, 2, 0]
    assert sorted(group.trained_tokens()) == sorted(tokens_of(rollouts))
    second = {tuple(tokens) for tokens in group.sent[1]["batch"]["tokens"]}
    last_of_first = rollouts[0][2][2]
    assert tuple(last_of_first.tokens) in second


def test_carried_rewards_are_normalized_in_their_own_group() -> None:
    group = RecordingGroup(config())
    rollouts = [make_samples(3, 3, seed=seed) for seed in range(2)]
    expected = make_train_batch(config(), flatten_samples(rollouts[0]))
    for i, samples in enumerate(rollouts):
        group.train(i, samples)
    sent = group.sent[1]["batch"]
    place = [tuple(tokens) for tokens in sent["tokens"]].index(tuple(expected.tokens[8]))
    assert sent["rewards"][place] == expected.rewards[8] != 0.0
    assert sent["raw_reward"][place] == rollouts[0][2][2].reward


def test_warns_and_skips_training_when_rollouts_fill_no_step(caplog: pytest.LogCaptureFixture) -> None:
    group = RecordingGroup(config(global_batch_size=12, num_steps_per_rollout=1))
    with caplog.at_level(logging.WARNING):
        result = group.train(5, make_samples(3, 3))
    assert group.sent == []
    assert result.metrics == []
    assert result.rollout_metrics["rollout/carried_rollouts"] == 9
    assert result.rollout_metrics["rollout/excluded_samples"] == 0
    assert result.rollout_metrics["perf/train_time"] > 0
    assert "rollout 5 is not trained on yet: 9 rollouts are waiting" in caplog.text
    assert "--global-batch-size 12" in caplog.text
    assert group.train(6, make_samples(3, 3, seed=1)).rollout_metrics["rollout/carried_rollouts"] == 6
    assert group.rollouts_per_step() == [[12]]


def test_num_tokens_counts_only_trained_samples() -> None:
    group = RecordingGroup(config())
    samples = make_samples(3, 3)
    group.train(0, samples)
    assert group.sent[0]["num_tokens"] == sum(len(sample.tokens) for sample in flatten_samples(samples)[:8])


def test_fanned_out_rollout_is_carried_over_whole() -> None:
    flat = flatten_samples(make_samples(2, 3))
    for sample, rollout_id in zip(flat, [10, 10, 11, 12, 12, 12], strict=True):
        sample.rollout_id = rollout_id
    group = RecordingGroup(config(global_batch_size=2))
    assert group.train(0, [flat]).rollout_metrics["rollout/carried_rollouts"] == 1
    assert group._carried is not None
    assert group._carried.rollout_ids == [12, 12, 12]


def test_clashing_rollout_ids_are_renumbered() -> None:
    carried, fresh = batch(0), batch(1, groups=1)
    assert carried.rollout_ids == [0, 1, 2, 3, 4, 5]
    assert fresh.rollout_ids == [0, 1, 2]
    joined = prepend_carried(carried, fresh)
    assert joined.rollout_ids == [6, 7, 8, 3, 4, 5, 0, 1, 2]
    assert joined.group_indices == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert [tuple(t) for t in joined.tokens] == [tuple(t) for t in (*carried.tokens, *fresh.tokens)]
    assert_same(joined.select(range(6, 9)), fresh)


def test_joined_batch_has_log_probs_only_if_both_parts_do() -> None:
    assert prepend_carried(batch(0), batch(1, with_log_probs=False)).rollout_log_probs is None
    joined = prepend_carried(batch(0), batch(1)).rollout_log_probs
    assert joined is not None
    assert len(joined) == 12


def test_carryover_file_round_trips_rows_exactly(tmp_path: Path) -> None:
    rows = batch()
    rows.train_metadata[1] = {"note": "ü\ud800", 3: [1.5, None], "array": np.arange(6, dtype=np.int16).reshape(2, 3)}
    rows.raw_reward[2] = float("nan")
    save_carried(tmp_path, 4, rows)
    loaded = load_carried(tmp_path, 4)
    assert loaded is not None
    assert_same(loaded, rows)
    assert loaded.tokens[0].dtype == np.int32
    assert loaded.loss_masks[0].dtype == np.int8
    assert loaded.tokens[0].flags.writeable
    assert [path.name for path in (tmp_path / "rollout").iterdir()] == ["carried_4.msgpack"]


def test_empty_carryover_removes_the_file(tmp_path: Path) -> None:
    assert load_carried(tmp_path, 0) is None
    save_carried(tmp_path, 0, batch())
    save_carried(tmp_path, 0, None)
    assert not carried_path(tmp_path, 0).exists()
    assert load_carried(tmp_path, 0) is None


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    save_carried(tmp_path, 0, batch())
    before = carried_path(tmp_path, 0).read_bytes()
    broken = batch(1)
    broken.train_metadata[0] = {"thing": object()}
    with pytest.raises(TypeError, match="object in the train metadata"):
        save_carried(tmp_path, 0, broken)
    assert carried_path(tmp_path, 0).read_bytes() == before
    assert len(list((tmp_path / "rollout").iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "unreadable"),
        (b"\xc1\xff", "unreadable"),
        (msgpack.packb({"a": 1})[:-1], "unreadable"),
        (msgpack.packb(msgpack.ExtType(9, b"x")), "unreadable"),
        (msgpack.packb([1, 2]), "another version"),
        (msgpack.packb({"format": 99, "batch": {}}), "another version"),
        (msgpack.packb({"format": 1}), "another version"),
        (msgpack.packb({"format": 1, "batch": {"tokens": []}}), "another version"),
    ],
)
def test_rejects_damaged_carryover_file_with_remedy(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = carried_path(tmp_path, 3)
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"carried_3\.msgpack: .*{sentence}.*delete the file to continue"):
        load_carried(tmp_path, 3)


def test_remove_stale_deletes_carryover_without_checkpoint(tmp_path: Path) -> None:
    for rollout_id in (0, 1, 12):
        save_carried(tmp_path, rollout_id, batch())
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000012").mkdir()
    (tmp_path / "rollout" / "data_state_0.json").write_text("{}")
    remove_stale(tmp_path)
    left = sorted(path.name for path in (tmp_path / "rollout").iterdir())
    assert left == ["carried_1.msgpack", "carried_12.msgpack", "data_state_0.json"]
    remove_stale(tmp_path / "missing")


def test_carryover_is_saved_with_checkpoint_and_loaded_at_start(tmp_path: Path) -> None:
    saving = config(save=str(tmp_path), load=str(tmp_path))
    first = RecordingGroup(saving)
    assert first.start() == 0
    first.train(0, make_samples(3, 3))
    assert first.save(0) == tmp_path / "iter_0000000"
    assert carried_path(tmp_path, 0).is_file()
    resumed = RecordingGroup(saving, start=1)
    assert resumed.start() == 1
    for group in (first, resumed):
        group.train(1, make_samples(3, 3, seed=1))
    np.testing.assert_equal(resumed.sent[-1], first.sent[-1])
    assert resumed._carried is not None
    assert resumed._carried.rollout_ids == first._carried.rollout_ids  # type: ignore[union-attr]
    other = RecordingGroup(saving, start=2)  # no carry-over, or its file is missing
    other.start()
    assert other._carried is None


def test_resumed_run_matches_uninterrupted_run(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    shared = {"hf_checkpoint": str(model_folder("qwen3")), "save": str(tmp_path / "ckpt"), "lr": 1e-3}
    balanced = {"balance_data": True, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}
    base = config(**shared, **balanced)
    rollouts = [make_samples(3, 3, seed=seed) for seed in range(3)]
    whole = []
    with TrainerGroup(base, device="cpu", run_dir=tmp_path / "whole") as group:
        group.start()
        for i, samples in enumerate(rollouts):
            whole.append(group.train(i, samples, last=i == 2))
            if i == 0:
                group.save(i)
    resumed = []
    with TrainerGroup(base.replace(load=base.save), device="cpu", run_dir=tmp_path / "resumed") as group:
        assert group.start() == 1
        for i in (1, 2):
            resumed.append(group.train(i, rollouts[i], last=i == 2))
    assert [len(result.metrics) for result in whole] == [2, 2, 3]
    assert [step["train/global_batch_size"] for step in whole[2].metrics] == [4, 4, 3]
    for one, other in zip(whole[1:], resumed, strict=True):
        assert one.metrics == other.metrics
        assert one.rollout_metrics["rollout/carried_rollouts"] == other.rollout_metrics["rollout/carried_rollouts"]
