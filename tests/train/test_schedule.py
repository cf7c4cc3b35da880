"""The schedule gives every sample to exactly one micro-batch, and every rank the same number of them."""

from __future__ import annotations

import random

import pytest

from slime.train.schedule import Schedule, build_schedule


def check(schedule: Schedule, lengths, rollout_ids, *, ranks, trainable=None) -> None:
    seen = [p for step in schedule.steps for rank in step.ranks for members in rank for p in members]
    expected = [p for p in range(len(lengths)) if trainable is None or trainable[p]]
    assert sorted(seen) == expected
    assert sum(step.num_rollouts for step in schedule.steps) == len(set(rollout_ids))
    step_of_rollout: dict[int, int] = {}
    for number, step in enumerate(schedule.steps):
        assert len(step.ranks) == ranks
        assert {len(micro_batches) for micro_batches in step.ranks} == {step.num_micro_batches}
        for p in (p for rank in step.ranks for members in rank for p in members):
            assert step_of_rollout.setdefault(rollout_ids[p], number) == number


def test_fixed_micro_batches() -> None:
    lengths = [5, 9, 3, 7, 2, 8]
    schedule = build_schedule(
        lengths, list(range(6)), num_ranks=1, global_batch_size=3, micro_batch_size=2, max_tokens=None
    )
    check(schedule, lengths, list(range(6)), ranks=1)
    assert [step.ranks for step in schedule.steps] == [[[[1, 0], [2]]], [[[5, 3], [4]]]]


def test_token_budget_is_kept_and_an_oversized_sample_is_alone() -> None:
    lengths = [10, 60, 20, 20, 15, 5]
    schedule = build_schedule(lengths, list(range(6)), num_ranks=1, global_batch_size=6, max_tokens=40)
    check(schedule, lengths, list(range(6)), ranks=1)
    for members in schedule.steps[0].ranks[0]:
        assert sum(lengths[p] for p in members) <= 40 or members == [1]


def test_samples_of_one_rollout_stay_in_one_step() -> None:
    rollout_ids = [7, 8, 7, 9, 8, 7, 10]
    lengths = [4] * 7
    schedule = build_schedule(lengths, rollout_ids, num_ranks=2, global_batch_size=2, max_tokens=8)
    check(schedule, lengths, rollout_ids, ranks=2)
    assert [step.num_rollouts for step in schedule.steps] == [2, 2]


def test_fewer_samples_than_ranks_gives_empty_micro_batches() -> None:
    schedule = build_schedule([5], [0], num_ranks=3, global_batch_size=4)
    check(schedule, [5], [0], ranks=3)
    assert sorted(len(rank[0]) for rank in schedule.steps[0].ranks) == [0, 0, 1]


def test_untrainable_samples_count_as_rollouts_only() -> None:
    trainable = [True, False, True, False]
    schedule = build_schedule([4, 2, 4, 0], [0, 1, 2, 3], num_ranks=1, global_batch_size=4, trainable=trainable)
    check(schedule, [4, 2, 4, 0], [0, 1, 2, 3], ranks=1, trainable=trainable)
    assert schedule.steps[0].num_rollouts == 4


def test_trailing_rollouts_make_a_smaller_step_and_are_not_dropped() -> None:
    schedule = build_schedule([3] * 5, list(range(5)), num_ranks=1, global_batch_size=2)
    assert [step.num_rollouts for step in schedule.steps] == [2, 2, 1]


def test_ranks_get_similar_numbers_of_tokens() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(50, 600) for _ in range(64)]
    schedule = build_schedule(lengths, list(range(64)), num_ranks=4, global_batch_size=64, max_tokens=2048)
    loads = [sum(lengths[p] for members in rank for p in members) for rank in schedule.steps[0].ranks]
    assert max(loads) - min(loads) <= 0.1 * max(loads)


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(seed) -> None:
    generator = random.Random(seed)
    count = generator.randint(1, 40)
    lengths = [generator.randint(2, 50) for _ in range(count)]
    rollout_ids = [generator.randint(0, count) for _ in range(count)]
    ranks = generator.randint(1, 5)
    schedule = build_schedule(
        lengths,
        rollout_ids,
        num_ranks=ranks,
        global_batch_size=generator.randint(1, 10),
        micro_batch_size=generator.randint(1, 4),
        max_tokens=generator.choice([None, 60]),
    )
    check(schedule, lengths, rollout_ids, ranks=ranks)
