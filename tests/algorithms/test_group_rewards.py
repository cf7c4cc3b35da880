"""Group-relative rewards, leave-one-out rewards and the overlong penalty."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms.overlong import overlong_penalties
from slime.algorithms.rewards import normalize_group_rewards
from slime.algorithms.rloo import leave_one_out_rewards

SAMPLES = st.lists(
    st.tuples(st.floats(-5, 5), st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=1, max_size=16
)  # reward, group, rollout within the group, excluded


def earned(samples, group: int) -> dict[int, float]:
    """What each rollout of a group earned, as far as it counts: the mean of its samples."""
    rollouts = {rollout for _, own, rollout, out in samples if own == group and not out}
    return {
        rollout: statistics.fmean(r for r, own, other, out in samples if (own, other, out) == (group, rollout, False))
        for rollout in rollouts
    }


@given(SAMPLES, st.booleans())
def test_normalised_by_rollouts_not_by_counting_samples(samples, divide: bool) -> None:
    rewards, groups, rollouts, excluded = ([s[k] for s in samples] for k in range(4))
    got = normalize_group_rewards(rewards, groups, rollouts, divide_by_std=divide, excluded=excluded)
    for i, (reward, group, _, out) in enumerate(samples):
        members = list(earned(samples, group).values())
        expected = 0.0 if out else reward - statistics.fmean(members)
        if divide and not out and len(members) > 1:
            expected /= statistics.stdev(members) + 1e-6
        assert got[i] == pytest.approx(expected, abs=1e-6, rel=1e-6)


@given(SAMPLES)
def test_leave_one_rollout_out(samples) -> None:
    rewards, groups, rollouts, excluded = ([s[k] for s in samples] for k in range(4))
    got = leave_one_out_rewards(rewards, groups, rollouts, excluded=excluded)
    for i, (reward, group, rollout, out) in enumerate(samples):
        others = [mean for other, mean in earned(samples, group).items() if other != rollout]
        expected = 0.0 if out or not others else reward - statistics.fmean(others)
        assert got[i] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("function", [normalize_group_rewards, leave_one_out_rewards])
def test_failed_samples_have_no_say_and_get_zero(function) -> None:
    with_failure = function([1, 0, math.nan], [0, 0, 0], excluded=[False, False, True])
    assert with_failure[:2] == function([1, 0], [0, 0])
    assert with_failure[2] == 0.0


@pytest.mark.parametrize("function", [normalize_group_rewards, leave_one_out_rewards])
def test_a_group_of_one_and_equal_rewards_give_zero(function) -> None:
    assert function([0.25] * 4, [0, 0, 0, 7]) == [0.0] * 4


@pytest.mark.parametrize("function", [normalize_group_rewards, leave_one_out_rewards])
def test_counts_that_differ_are_refused(function) -> None:
    with pytest.raises(ValueError, match="2 rewards but 1 group indices"):
        function([1.0, 2.0], [0])


@given(
    st.lists(st.integers(0, 300), min_size=1),
    st.integers(1, 200),
    st.integers(1, 200),
    st.floats(0, 3),
)
def test_overlong_penalty_follows_dapo_equation_13(lengths, buffer, free, penalty) -> None:
    limit = free + buffer
    got = overlong_penalties(lengths, max_len=limit, buffer_len=buffer, penalty=penalty)
    for length, value in zip(lengths, got, strict=True):
        if length <= limit - buffer:
            expected = 0.0
        elif length <= limit:
            expected = ((limit - buffer) - length) / buffer * penalty
        else:
            expected = -penalty
        assert value == pytest.approx(expected, abs=1e-12)


def test_no_buffer_is_no_penalty() -> None:
    assert overlong_penalties([5, 100], max_len=10, buffer_len=0, penalty=1.0) == [0.0, 0.0]
