"""Tests the micro-batch schedule: every sample once or left over, equal micro-batch counts on all ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.train.microbatch_plan import (
    PromptGroups,
    Schedule,
    assign_to_ranks,
    balance_bins,
    build_schedule,
    first_fit_bins,
    raise_to_multiple,
)


def check(schedule: Schedule, lengths, rollout_ids, *, ranks, trainable=None) -> None:
    seen = [p for step in schedule.steps for rank in step.ranks for members in rank for p in members]
    left = {rollout_ids[p] for p in schedule.left_over}
    expected = [p for p in range(len(lengths)) if (trainable is None or trainable[p]) and rollout_ids[p] not in left]
    assert sorted(seen) == expected
    assert schedule.left_over == [p for p in range(len(lengths)) if rollout_ids[p] in left]
    assert sum(step.num_rollouts for step in schedule.steps) + len(left) == len(set(rollout_ids))
    step_of_rollout: dict[int, int] = {}
    for number, step in enumerate(schedule.steps):
        assert len(step.ranks) == ranks
        assert {len(micro_batches) for micro_batches in step.ranks} == {len(step.ranks[0])}
        assert len(step.ranks[0]) >= 1
        for p in step.positions:
            assert step_of_rollout.setdefault(rollout_ids[p], number) == number


def test_fixed_micro_batch_size() -> None:
    lengths = [5, 9, 3, 7, 2, 8]
    schedule = build_schedule(
        lengths, list(range(6)), num_ranks=1, global_batch_size=3, micro_batch_size=2, max_tokens=None
    )
    check(schedule, lengths, list(range(6)), ranks=1)
    assert [step.ranks for step in schedule.steps] == [[[[1, 0], [2]]], [[[5, 3], [4]]]]


def test_token_budget_holds_and_oversized_sample_is_alone() -> None:
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
    schedule = build_schedule([5], [0], num_ranks=3, global_batch_size=4, fill_last=True)
    check(schedule, [5], [0], ranks=3)
    assert sorted(len(rank[0]) for rank in schedule.steps[0].ranks) == [0, 0, 1]


def test_untrainable_samples_count_as_rollouts_only() -> None:
    trainable = [True, False, True, False]
    schedule = build_schedule([4, 2, 4, 0], [0, 1, 2, 3], num_ranks=1, global_batch_size=4, trainable=trainable)
    check(schedule, [4, 2, 4, 0], [0, 1, 2, 3], ranks=1, trainable=trainable)
    assert schedule.steps[0].num_rollouts == 4


def test_trailing_rollouts_are_left_over_or_fill_a_smaller_step() -> None:
    rollout_ids = [4, 4, 5, 6, 7, 8, 6, 8]
    waiting = build_schedule([3] * 8, rollout_ids, num_ranks=1, global_batch_size=2)
    assert [step.num_rollouts for step in waiting.steps] == [2, 2]
    assert waiting.left_over == [5, 7]
    last = build_schedule([3] * 8, rollout_ids, num_ranks=1, global_batch_size=2, fill_last=True)
    assert [step.num_rollouts for step in last.steps] == [2, 2, 1]
    assert last.left_over == []
    assert last.steps[:2] == waiting.steps


def test_too_few_rollouts_make_no_step() -> None:
    schedule = build_schedule([3, 4], [0, 1], num_ranks=1, global_batch_size=3)
    assert schedule == Schedule(steps=[], left_over=[0, 1])


def test_ranks_get_similar_numbers_of_tokens() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(50, 600) for _ in range(64)]
    schedule = build_schedule(lengths, list(range(64)), num_ranks=4, global_batch_size=64, max_tokens=2048)
    loads = [sum(lengths[p] for members in rank for p in members) for rank in schedule.steps[0].ranks]
    assert max(loads) - min(loads) <= 0.1 * max(loads)


def quadratic(length: int) -> float:
    return 1000.0 * length + length * length


def loads(schedule: Schedule, weights) -> list[float]:
    return [sum(weights[p] for members in rank for p in members) for rank in schedule.steps[0].ranks]


def spread(values) -> float:
    return max(values) / (sum(values) / len(values))


@pytest.mark.parametrize("cut", [{"max_tokens": 8192}, {"micro_batch_size": 1}, {"micro_batch_size": 4}])
def test_costs_balance_ranks_better_than_tokens(cut: dict[str, Any]) -> None:
    generator = random.Random(0)
    lengths = [int(generator.lognormvariate(7, 0.7)) + 10 for _ in range(128)]
    costs = [quadratic(length) for length in lengths]
    ids, shape = list(range(128)), {"num_ranks": 8, "global_batch_size": 128}
    by_tokens = build_schedule(lengths, ids, **shape, **cut)
    by_costs = build_schedule(lengths, ids, **shape, **cut, costs=costs)
    check(by_costs, lengths, ids, ranks=8)
    assert spread(loads(by_costs, costs)) < 1.01 < 1.1 < spread(loads(by_tokens, costs))
    for rank in by_costs.steps[0].ranks:  # heaviest first, so that ranks run similar micro-batches together
        in_order = [sum(costs[p] for p in members) for members in rank]
        assert in_order == sorted(in_order, reverse=True)


def test_by_flops_balances_micro_batches_with_minimal_count() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(100, 3000) for _ in range(128)]
    costs = [quadratic(length) for length in lengths]
    schedule = build_schedule(
        lengths, list(range(128)), num_ranks=4, global_batch_size=128, max_tokens=8192, costs=costs, by_flops=True
    )
    check(schedule, lengths, list(range(128)), ranks=4)
    assert 4 * (len(schedule.steps[0].ranks[0]) - 1) < sum(lengths) / 8192 <= 4 * len(schedule.steps[0].ranks[0])
    micro_batches = [sum(costs[p] for p in members) for rank in schedule.steps[0].ranks for members in rank]
    assert spread(micro_batches) < 1.05
    assert max(sum(lengths[p] for p in members) for rank in schedule.steps[0].ranks for members in rank) > 8192


def test_by_flops_requires_costs_and_max_tokens() -> None:
    with pytest.raises(ValueError, match="need the costs"):
        build_schedule([1], [0], num_ranks=1, global_batch_size=1, max_tokens=5, by_flops=True)
    with pytest.raises(ValueError, match="a number of tokens"):
        build_schedule([1], [0], num_ranks=1, global_batch_size=1, costs=[1.0], by_flops=True)


def test_without_costs_the_assignment_is_by_tokens() -> None:
    lengths = [8, 7, 6, 5, 4, 3]
    schedule = build_schedule(lengths, list(range(6)), num_ranks=2, global_batch_size=6, max_tokens=9)
    assert schedule.steps[0].ranks == [[[2, 5], [0]], [[3, 4], [1]]]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[int], list[int], list[bool], dict[str, Any]]:
    """Draw lengths, rollout ids, trainable flags and schedule options."""
    count = draw(st.integers(0, 40))
    lengths = draw(st.lists(st.integers(1, 80), min_size=count, max_size=count))
    rollout_ids = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    trainable = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    options: dict[str, Any] = {
        "num_ranks": draw(st.integers(1, 5)),
        "global_batch_size": draw(st.integers(1, 10)),
        "micro_batch_size": draw(st.integers(1, 4)),
        "max_tokens": draw(st.sampled_from([None, 60])),
        "fill_last": draw(st.booleans()),
        "trainable": trainable,
    }
    if draw(st.booleans()):
        options["costs"] = [quadratic(length) for length in lengths]
        options["by_flops"] = options["max_tokens"] is not None and draw(st.booleans())
    return lengths, rollout_ids, trainable, options


@given(shapes())
def test_every_sample_is_scheduled_at_most_once(shape) -> None:
    lengths, rollout_ids, trainable, options = shape
    schedule = build_schedule(lengths, rollout_ids, **options)
    check(schedule, lengths, rollout_ids, ranks=options["num_ranks"], trainable=trainable)
    size = options["global_batch_size"]
    full = schedule.steps[:-1] if options["fill_last"] else schedule.steps
    assert all(step.num_rollouts == size for step in full)
    assert all(1 <= step.num_rollouts <= size for step in schedule.steps)
    assert len({rollout_ids[p] for p in schedule.left_over}) < size
    assert not (options["fill_last"] and schedule.left_over)
    assert schedule == build_schedule(list(lengths), list(rollout_ids), **options)


@given(shapes())
def test_micro_batches_respect_size_limits(shape) -> None:
    lengths, rollout_ids, _, options = shape
    schedule = build_schedule(lengths, rollout_ids, **options)
    for members in (members for step in schedule.steps for rank in step.ranks for members in rank):
        if options["max_tokens"] is None:
            assert len(members) <= options["micro_batch_size"]
        elif not options.get("by_flops"):
            assert sum(lengths[p] for p in members) <= 60 or len(members) == 1


def plain_first_fit(lengths: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda p: -lengths[p]):
        fitting = [b for b in bins if sum(lengths[p] for p in b) + lengths[position] <= max_tokens]
        if fitting:
            fitting[0].append(position)
        else:
            bins.append([position])
    return bins


def plain_level(lengths: list[int], count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    for position in sorted(range(len(lengths)), key=lambda p: -lengths[p]):
        min(bins, key=lambda b: sum(lengths[p] for p in b)).append(position)
    return bins


def plain_even(bins: list[list[int]], lengths: list[int], multiple: int) -> list[list[int]]:
    bins = [list(b) for b in bins]
    while not bins or len(bins) % multiple:
        divisible = [b for b in bins if len(b) > 1]
        if not divisible:
            bins.append([])
            continue
        heaviest = max(divisible, key=lambda b: sum(lengths[p] for p in b))
        own = [lengths[p] for p in sorted(heaviest)]
        one, two = ([sorted(heaviest)[i] for i in half] for half in plain_level(own, 2))
        bins[bins.index(heaviest)] = one
        bins.append(two)
    return bins


def plain_ranks(bins: list[list[int]], lengths: list[int], ranks: int) -> list[list[list[int]]]:
    given: list[list[list[int]]] = [[] for _ in range(ranks)]
    for members in sorted(bins, key=lambda b: (-sum(lengths[p] for p in b), b)):
        free = [rank for rank in given if len(rank) < len(bins) // ranks]
        min(free, key=lambda rank: sum(lengths[p] for b in rank for p in b)).append(members)
    return given


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(20, 100), st.integers(1, 6))
def test_bins_match_plain_implementation(lengths: list[int], max_tokens: int, ranks: int) -> None:
    positions = list(range(len(lengths)))
    bins = first_fit_bins(positions, lengths, max_tokens)
    assert bins == plain_first_fit(lengths, max_tokens)
    expected = plain_even(bins, lengths, ranks)
    raise_to_multiple(bins, lengths, ranks)
    assert bins == expected
    assert balance_bins(positions, lengths, len(bins)) == plain_level(lengths, len(bins))
    assert assign_to_ranks(bins, lengths, ranks) == plain_ranks(bins, lengths, ranks)


def test_groups_stay_together_if_micro_batch_count_allows() -> None:
    groups = [group for group in range(8) for _ in range(4)]
    lengths, prompts = [40] * 32, [10] * 32
    asked = {"rollout_ids": range(32), "num_ranks": 2, "global_batch_size": 32, "max_tokens": 320}
    apart = build_schedule(lengths, **asked).steps[0].ranks
    kept = build_schedule(lengths, **asked, prompts=PromptGroups(groups, prompts)).steps[0].ranks
    assert [[len(members) for members in rank] for rank in kept] == [[8, 8], [8, 8]]
    assert sorted(p for rank in kept for members in rank for p in members) == list(range(32))
    for rank in kept:
        for members in rank:
            assert len({groups[p] for p in members}) == 2
    assert any(len({groups[p] for p in members}) > 2 for rank in apart for members in rank)
    large = PromptGroups([p // 16 for p in range(32)], prompts)
    tight = build_schedule(lengths, **{**asked, "max_tokens": 480}, prompts=large)
    assert tight == build_schedule(lengths, **{**asked, "max_tokens": 480})  # groups of 640 tokens do not fit
    few = PromptGroups([0] * 32, prompts)
    assert build_schedule(lengths, **asked, prompts=few) == build_schedule(
        lengths, **asked
    )  # one group, four micro-batches


@pytest.mark.parametrize(("prompt", "together"), [(2, False), (30, True)])
def test_groups_stay_together_only_if_ranks_stay_balanced(prompt: int, together: bool) -> None:
    lengths = [100, 100, 80, 80]  # whole groups have 200 and 160 tokens, one for each rank
    groups = [0, 0, 1, 1]
    asked = {"rollout_ids": range(4), "num_ranks": 2, "global_batch_size": 4, "max_tokens": 400}
    found = build_schedule(lengths, **asked, prompts=PromptGroups(groups, [prompt] * 4)).steps[0].ranks
    chosen = sorted(sorted(members) for rank in found for members in rank)
    assert chosen == ([[0, 1], [2, 3]] if together else [[0, 2], [1, 3]])


def test_shared_prompt_tokens_count_once_per_group_in_micro_batch() -> None:
    prompts = PromptGroups(groups=[0, 0, 1, 0], lengths=[5, 5, 3, 5])
    assert prompts.computed([0, 1, 2, 3], [9, 8, 7, 6]) == 9 + (8 - 5) + 7 + (6 - 5)
    assert prompts.computed([], [9, 8, 7, 6]) == 0
