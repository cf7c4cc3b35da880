"""Tests the conversion of samples to batch arrays: masks, rewards, rollout ids, failed samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.config import Config, derive
from slime.data.sample import Sample
from slime.errors import UserError
from slime.train.microbatch_plan import build_schedule
from slime.train.samples.batch import TrainBatch, batch_metrics, flatten_samples, make_train_batch
from slime.train.samples.dp_shards import open_share, rank_shares
from tests.train.tiny_training import make_samples


def config(**changes) -> Config:
    return Config(hf_checkpoint="unused", rollout_batch_size=1, **changes)


def sample(**changes) -> Sample:
    values = {"index": 0, "group_index": 0, "tokens": [1, 2, 3, 4], "response_length": 2, "reward": 1.0}
    return Sample(**(values | changes))


def test_batch_columns_match_the_samples() -> None:
    samples = flatten_samples(make_samples(3, 2))
    batch = make_train_batch(config(), samples)
    assert len(batch) == 6
    for i, one in enumerate(samples):
        assert batch.tokens[i].tolist() == one.tokens
        assert batch.loss_masks[i].tolist() == one.loss_mask
        assert batch.rollout_mask_sums[i] == sum(one.loss_mask)
        assert batch.raw_reward[i] == one.reward
    assert batch.rollout_log_probs is not None
    assert len(set(batch.rollout_ids)) == 6


def test_fanned_out_samples_share_rollout_id_and_mask_sum() -> None:
    nested = [[[sample(rollout_id=5, index=0), sample(rollout_id=5, index=1, loss_mask=[1, 0])], [sample(index=2)]]]
    batch = make_train_batch(config(), flatten_samples(nested))
    assert batch.rollout_ids == [5, 5, 6]
    assert batch.rollout_mask_sums == [3, 3, 2]


def completed_sample(reward: float, **ids) -> Sample:
    """Make a sample like a generate function does: without ids unless they are given."""
    return Sample(tokens=[1, 2, 3], response_length=1, reward=reward, status=Sample.Status.COMPLETED, **ids)


def test_nesting_determines_missing_group_and_rollout_ids() -> None:
    nested = [
        [
            [completed_sample(1.0), completed_sample(1.0), completed_sample(1.0)],
            [completed_sample(0.0)],
            completed_sample(0.0),
        ],
        [[completed_sample(2.0, group_index=9, index=4), completed_sample(2.0)], [completed_sample(1.0)]],
        completed_sample(5.0),
    ]
    batch = make_train_batch(config(advantage_estimator="rloo"), flatten_samples(nested))
    assert batch.rewards == [1.0, 1.0, 1.0, -0.5, -0.5, 1.0, 1.0, -1.0, 0.0]
    assert batch.rollout_mask_sums == [3, 3, 3, 1, 1, 2, 2, 1, 1]
    first, second, alone = batch.group_indices[:5], batch.group_indices[5:8], batch.group_indices[8]
    assert (len(set(first)), set(second)) == (1, {9})
    assert len({first[0], 9, alone}) == 3
    assert len(set(batch.rollout_ids)) == 6


def test_samples_without_ids_inherit_ids_of_their_siblings() -> None:
    nested = [
        [
            [completed_sample(1.0, group_index=3, rollout_id=8), completed_sample(1.0)],
            completed_sample(0.0, group_index=3),
        ],
        [completed_sample(0.0)],
    ]
    flat = flatten_samples(nested)
    assert [(s.group_index, s.rollout_id) for s in flat[:2]] == [(3, 8)] * 2
    assert make_train_batch(config(advantage_estimator="rloo"), flat).rewards == [1.0, 1.0, -1.0, 0.0]


def test_same_rollout_id_in_two_groups_means_two_rollouts() -> None:
    """A generate function may number the rollouts of each prompt from 0."""
    flat = [completed_sample(float(r), group_index=g, rollout_id=r) for g in (0, 1) for r in (0, 0, 1)]
    batch = make_train_batch(config(advantage_estimator="rloo"), flat)
    assert batch.rewards == [-1.0, -1.0, 1.0] * 2
    assert len(set(batch.rollout_ids)) == 4
    assert batch.rollout_mask_sums == [2, 2, 1] * 2


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize(("second", "population"), [(1.0, "rollouts"), (0.5, "samples")])
def test_overlong_penalty_does_not_change_the_advantage_population(
    estimator: str, second: float, population: str
) -> None:
    """Siblings with equal rewards count once, regardless of their length penalties."""
    long = {"tokens": list(range(10)), "response_length": 9}
    flat = [sample(rollout_id=0, **long), sample(rollout_id=0, reward=second), sample(reward=0.0), sample(reward=1.0)]
    flags = {"overlong_buffer_len": 4, "rollout_max_response_len": 10, "advantage_estimator": estimator}
    rewards = make_train_batch(config(**flags), flat).rewards
    assert rewards == make_train_batch(config(**flags, advantage_population=population), flat).rewards
    assert (rewards[0] == rewards[1]) is (population == "rollouts")


def test_fan_out_without_group_index_forms_one_group() -> None:
    flat = [completed_sample(1.0, rollout_id=3), completed_sample(1.0, rollout_id=3), completed_sample(1.0)]
    batch = make_train_batch(config(), flat)
    assert batch.group_indices[0] == batch.group_indices[1] != batch.group_indices[2]


def test_remove_sample_zeroes_mask_and_keeps_reward_in_group_baseline() -> None:
    batch = make_train_batch(config(), [sample(remove_sample=True, reward=1.0), sample(reward=0.0)])
    assert batch.loss_masks[0].tolist() == [0, 0]
    assert batch.rewards[1] == pytest.approx(-(0.5) / (0.5**0.5 + 1e-6))


def test_failed_sample_is_counted_and_excluded_from_training() -> None:
    failed = sample(status=Sample.Status.FAILED, reward=None)
    batch = make_train_batch(config(), [sample(reward=1.0), sample(reward=0.0), failed])
    alone = make_train_batch(config(), [sample(reward=1.0), sample(reward=0.0)])
    assert batch.rewards == [*alone.rewards, 0.0]
    assert batch.loss_masks[2].sum() == 0
    metrics = batch_metrics(batch)
    assert metrics["rollout/raw_reward"] == 0.5
    without = batch_metrics(batch, with_rewards=False)
    assert set(metrics) - set(without) == {"rollout/raw_reward", "rollout/rewards"}
    assert metrics["rollout/excluded_samples"] == 1


@pytest.mark.parametrize(
    ("estimator", "split", "single"),
    [
        ("rloo", 1.0, -0.5),
        ("grpo", (2 / 3) / (math.sqrt(1 / 3) + 1e-6), (-1 / 3) / (math.sqrt(1 / 3) + 1e-6)),
        ("dr_grpo", 2 / 3, -1 / 3),
        ("reinforce_plus_plus_baseline", 2 / 3, -1 / 3),
    ],
)
def test_split_rollout_counts_once_in_group_statistics(estimator: str, split: float, single: float) -> None:
    """Three rollouts have rewards 1, 0 and 0; the first is split into four samples, one of which failed."""
    split_up = [sample(rollout_id=7) for _ in range(3)]
    split_up.append(sample(rollout_id=7, status=Sample.Status.FAILED, reward=100.0))
    others = [sample(reward=0.0), sample(reward=0.0)]
    gone = sample(rollout_id=8, status=Sample.Status.FAILED, reward=-100.0)
    flags = derive(config(advantage_estimator=estimator, normalize_advantages=estimator.startswith("reinforce")))
    batch = make_train_batch(flags, [*split_up, *others, gone])
    assert batch.rewards == pytest.approx([split] * 3 + [0.0] + [single] * 2 + [0.0], abs=1e-9)


def test_reward_normalization_flags() -> None:
    pair = [sample(reward=3.0), sample(reward=1.0)]
    assert make_train_batch(config(disable_rewards_normalization=True), pair).rewards == [3.0, 1.0]
    assert make_train_batch(config(disable_grpo_std_normalization=True), pair).rewards == [1.0, -1.0]


@pytest.mark.parametrize(
    "broken",
    [
        {"rollout_log_probs": None},
        {"rollout_log_probs": [-1.0]},
        {"rollout_log_probs": [math.nan, -1.0]},
        {"teacher_log_probs": None},
        {"response_length": 9, "loss_mask": [1] * 9},
        {"response_length": -1},
        {"reward": {"score": 1.0}},
        {"tokens": []},
    ],
)
def test_failed_sample_with_invalid_fields_keeps_log_probs_of_others(broken: dict[str, Any]) -> None:
    """For example a teacher request that failed, or a generate function that stopped early."""
    whole = {"rollout_log_probs": [-1.0, -2.0], "teacher_log_probs": [-3.0, -4.0]}
    failed = sample(**({"status": Sample.Status.FAILED, "reward": None} | whole | broken))
    batch = make_train_batch(config(), [sample(**whole), failed, sample(reward=0.0, **whole)])
    assert batch.rollout_log_probs is not None
    assert batch.teacher_log_probs is not None
    for position in (0, 2):
        assert batch.rollout_log_probs[position].tolist() == [-1.0, -2.0]
        assert batch.teacher_log_probs[position].tolist() == [-3.0, -4.0]
    assert not batch.loss_masks[1].any()
    assert len(batch.rollout_log_probs[1]) == len(batch.teacher_log_probs[1]) == batch.response_lengths[1]
    assert np.isfinite(batch.rollout_log_probs[1]).all()


def test_missing_log_probs_drop_the_column_only_if_sample_is_trained_on() -> None:
    whole = sample(rollout_log_probs=[-1.0, -2.0])
    assert make_train_batch(config(), [whole, sample()]).rollout_log_probs is None
    removed = make_train_batch(config(), [whole, sample(remove_sample=True)]).rollout_log_probs
    assert removed is not None
    assert [column.tolist() for column in removed] == [[-1.0, -2.0], [0.0, 0.0]]


def test_custom_reward_post_process_replaces_rewards(tmp_path: Path) -> None:
    plugin = tmp_path / "post.py"
    plugin.write_text(
        "def halve(args, samples):\n    r = [s.reward for s in samples]\n    return r, [x / 2 for x in r]\n"
    )
    batch = make_train_batch(config(custom_reward_post_process_path=f"{plugin}:halve"), [sample(reward=3.0)])
    assert (batch.raw_reward, batch.rewards) == ([3.0], [1.5])


def test_dict_round_trip_of_selected_samples() -> None:
    batch = make_train_batch(config(), flatten_samples(make_samples(2, 2)))
    part = TrainBatch(**batch.select([3, 1]).to_dict())
    assert part.sample_indices == [3, 1]
    assert part.tokens[0].tolist() == batch.tokens[3].tolist()


def test_message_round_trip_with_one_array_per_column() -> None:
    samples = flatten_samples(make_samples(2, 2))
    samples[1].loss_mask = None
    samples[2].remove_sample = True
    batch = make_train_batch(config(), samples)
    message = batch.to_message()
    assert message["tokens"]["values"].shape == (sum(batch.total_lengths),)
    again = open_share({"batch": message})
    np.testing.assert_equal(again.to_dict(), batch.to_dict())
    assert all(part.flags.writeable for part in again.tokens)  # hooks may modify their arrays
    nothing = open_share({"batch": batch.select([]).to_message()})
    assert (len(nothing), nothing.tokens, nothing.loss_masks) == (0, [], [])


def test_batch_shares_memory_with_compact_samples() -> None:
    """Arrays are not copied before sending: int32 ids, int8 masks, and zero-stride arrays for all-ones masks."""
    samples = flatten_samples(make_samples(2, 2))
    samples[0].loss_mask = None
    for one in samples:
        one.compact()
    batch = make_train_batch(config(), samples)
    assert batch.rollout_log_probs is not None
    for position, one in enumerate(samples):
        assert np.shares_memory(batch.tokens[position], one.token_array())
        assert batch.tokens[position].dtype == np.int32
        assert batch.loss_masks[position].dtype == np.int8
    assert batch.loss_masks[0].strides == (0,)


class CountedMask(np.ndarray):
    """A loss mask that counts its `sum` calls."""

    sums = 0

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        CountedMask.sums += 1
        return super().sum(*args, **kwargs)


@pytest.mark.parametrize("ranks", [1, 4])
def test_rank_shares_sum_each_loss_mask_once(ranks: int) -> None:
    batch = make_train_batch(config(), flatten_samples(make_samples(4, 3)))
    counts = [int(mask.sum()) for mask in batch.loss_masks]
    batch.loss_masks = [mask.astype(np.float32).view(CountedMask) for mask in batch.loss_masks]
    batch.mask_totals = None
    schedule = build_schedule(batch.total_lengths, batch.rollout_ids, num_ranks=ranks, global_batch_size=6)
    CountedMask.sums = 0
    shares = rank_shares(batch, schedule)
    assert CountedMask.sums == 12
    for number in range(2):
        expected = sum(counts[position] for position in schedule.steps[number].positions)
        assert [share["steps"][number]["num_tokens"] for share in shares] == [expected] * ranks
    sent = [open_share(share) for share in shares]
    assert sorted(index for part in sent for index in part.sample_indices) == list(range(12))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (sample(loss_mask=[1]), "1 loss-mask entries for 2 tokens"),
        (sample(rollout_log_probs=[0.0]), "1 rollout log-probs for 2 tokens"),
        (sample(response_length=4), "no prompt token before its response"),
        (sample(reward=None), "has no reward"),
    ],
)
def test_rejects_invalid_samples(broken, message) -> None:
    with pytest.raises(UserError, match=message):
        make_train_batch(config(), [broken])
