"""Tests the partition of weights into bins of nearly equal sums: complete, deterministic, close to optimal."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import slime.train.microbatch_plan as module
from slime.train.microbatch_plan import partition

weights_lists = st.lists(st.floats(0, 1e6, allow_nan=False), max_size=40)


def sums(bins: list[list[int]], weights: list[float]) -> list[float]:
    return [sum(weights[i] for i in members) for members in bins]


@given(weights_lists, st.integers(1, 9), st.booleans())
def test_each_weight_is_in_exactly_one_of_k_bins(weights: list[float], k: int, equal_size: bool) -> None:
    bins = partition(weights, k, equal_size=equal_size)
    assert len(bins) == k
    assert sorted(i for members in bins for i in members) == list(range(len(weights)))
    assert bins == partition(list(weights), k, equal_size=equal_size)
    assert all(members == sorted(members) for members in bins)
    assert sums(bins, weights) == sorted(sums(bins, weights), reverse=True)
    if equal_size:
        assert {len(members) for members in bins} <= {len(weights) // k, -(-len(weights) // k)}


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(2, 3))
def test_partition_is_within_four_thirds_of_optimum(weights: list[int], k: int) -> None:
    best = min(
        max(sum(w for w, b in zip(weights, choice, strict=True) if b == number) for number in range(k))
        for choice in product(range(k), repeat=len(weights))
    )
    assert max(sums(partition(weights, k, equal_size=False), weights)) <= best * 4 / 3


def test_partition_textbook_example() -> None:
    # 8 7 6 5 4 in two: differences 8-7=1, 6-5=1, 4-1=3, 3-1=2, so sums of 16 and 14
    bins = partition([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sums(bins, [8, 7, 6, 5, 4]) == [16, 14]


def test_equal_sizes_stay_balanced_for_many_weights() -> None:
    generator = random.Random(1)
    weights = [generator.lognormvariate(7, 1) for _ in range(256)]
    for equal_size in (False, True):
        loads = sums(partition(weights, 8, equal_size=equal_size), weights)
        assert max(loads) <= 1.002 * sum(loads) / 8


def test_swaps_balance_the_bin_with_a_heavy_weight() -> None:
    # neighbours start in one bin, so 20 would be with medium weights; swaps exchange them for the smallest
    bins = partition([20, 9, 8, 7, 2, 1, 6, 5], 2, equal_size=True)
    assert [len(members) for members in bins] == [4, 4]
    assert max(sums(bins, [20, 9, 8, 7, 2, 1, 6, 5])) == 29


def test_partition_of_no_weights_and_zero_bins() -> None:
    assert partition([], 3, equal_size=True) == [[], [], []]
    with pytest.raises(ValueError, match="0 bins"):
        partition([1.0], 0, equal_size=False)


def plain_differencing(weights: list[int], k: int) -> list[int]:
    """Compute the sums of the largest differencing method by its definition: k sums per part, including empty bins."""
    parts = [(order, [weight] + [0] * (k - 1)) for order, weight in enumerate(sorted(weights, reverse=True))]
    for order in range(len(weights), 2 * len(weights) - 1):
        parts.sort(key=lambda part: (part[1][-1] - part[1][0], part[0]))
        (_, one), (_, two) = parts[:2]
        merged = sorted((a + b for a, b in zip(one, reversed(two), strict=True)), reverse=True)
        parts = [*parts[2:], (order, merged)]
    return parts[0][1]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 9))
def test_partition_sums_match_plain_differencing(weights: list[int], k: int) -> None:
    assert sums(partition(weights, k, equal_size=False), weights) == plain_differencing(weights, k)


class Counted(float):
    """A weight that counts additions."""

    added = 0

    def __add__(self, other: float) -> Counted:
        Counted.added += 1
        return Counted(float(self) + float(other))

    __radd__ = __add__


def test_partition_work_grows_about_linearly() -> None:
    """Every weight joins a bin once and enters two sums at the end."""
    generator = random.Random(2)
    work = []
    for count in (500, 1000):
        Counted.added = 0
        partition([Counted(generator.randint(100, 8000)) for _ in range(count)], count // 4, equal_size=False)
        work.append(Counted.added)
    assert work[1] < 3 * work[0]
    assert work[1] < 20 * 1000


def test_swap_attempts_stay_below_number_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many bins of few weights, some of them huge, the time stays proportional to the number of weights."""
    rng = random.Random(0)
    weights = [rng.lognormvariate(0.0, 1.0) ** 2 for _ in range(2000)]
    tried = 0

    def counted(*args: Any) -> Any:
        nonlocal tried
        tried += 1
        return best_swap(*args)

    best_swap = module._best_swap
    monkeypatch.setattr(module, "_best_swap", counted)
    partition(weights, 256, equal_size=True)
    assert 0 < tried < len(weights)
