"""Group-relative rewards, leave-one-out rewards and the overlong penalty."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.rewards import (
    POPULATIONS,
    RewardGroups,
    leave_one_out_rewards,
    normalize_group_rewards,
    overlong_penalties,
)
from tests.rows import examples

SAMPLES = st.lists(
    st.tuples(st.floats(-5, 5), st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=1, max_size=16
)  # reward, group, rollout within the group, excluded


def population_values(samples, group: int, population: str) -> dict[int, list[float]]:
    """Map each rollout to the values that it contributes: the rewards of its samples, or their mean."""
    own: dict[int, list[float]] = {}
    for reward, other, rollout, out in samples:
        if other == group and not out:
            own.setdefault(rollout, []).append(reward)
    differ = any(len(set(rewards)) > 1 for rewards in own.values())
    if population == "samples" or (population == "auto" and differ):
        return own
    return {rollout: [statistics.fmean(rewards)] for rollout, rewards in own.items()}


@given(SAMPLES, st.booleans(), st.sampled_from(POPULATIONS))
def test_rewards_are_normalized_within_their_population(samples, divide: bool, population: str) -> None:
    rewards, groups, rollouts, excluded = ([s[k] for s in samples] for k in range(4))
    got = normalize_group_rewards(rewards, RewardGroups(groups, rollouts, excluded, population, divide))
    for i, (reward, group, rollout, out) in enumerate(samples):
        members = population_values(samples, group, population)
        values = [value for own in members.values() for value in own]
        expected = 0.0
        if not out:
            expected = (reward if reward in members[rollout] else members[rollout][0]) - statistics.fmean(values)
        if divide and not out and len(values) > 1:
            expected /= statistics.stdev(values) + 1e-6
        assert got[i] == pytest.approx(expected, abs=1e-6, rel=1e-6)


REWARDS = st.one_of(st.sampled_from([0.0, 0.1, 0.8, 1.0]), st.floats(-1e9, 1e9))


@settings(max_examples=examples(600))
@given(
    st.lists(st.tuples(REWARDS, st.integers(0, 2), st.integers(0, 4), st.booleans()), min_size=1, max_size=24),
    st.sampled_from(POPULATIONS),
)
def test_advantages_are_bounded_by_the_root_of_the_group_size(samples, population: str) -> None:
    rewards, groups, rollouts, excluded = ([s[k] for s in samples] for k in range(4))
    got = normalize_group_rewards(rewards, RewardGroups(groups, rollouts, excluded, population))
    for value, group in zip(got, groups, strict=True):
        assert abs(value) <= math.sqrt(groups.count(group)) + 1e-9


@pytest.mark.parametrize(
    ("population", "rewards", "expected"),
    [
        ("auto", [0, 0.8, 0.8, 0, 0, 0.8, 0.8, 0, 0, 0], [-0.774595] + [1.161892] * 2 + [-0.774595] * 2),
        ("rollouts", [0, 0.8, 0.8, 0, 0, 0.8, 0.8, 0, 0, 0], [0.0] * 5),
        ("auto", [1, 1, 1, 0, 0], [1.154699] * 3 + [-0.577349] * 2),
        ("samples", [1, 1, 1, 0, 0], [0.730295] * 3 + [-1.095443] * 2),
    ],
)
def test_split_rollouts_are_normalized_by_each_population(
    population: str, rewards: list[float], expected: list[float]
) -> None:
    """Two rollouts of five samples with equal means; three rollouts, the first with three samples."""
    rollouts = [0] * 5 + [1] * 5 if len(rewards) == 10 else [0, 0, 0, 1, 2]
    got = normalize_group_rewards(rewards, RewardGroups([0] * len(rewards), rollouts, population=population))
    assert got[:5] == pytest.approx(expected, abs=3e-6)


@given(SAMPLES, st.sampled_from(POPULATIONS))
def test_leave_one_out_excludes_the_own_rollout(samples, population: str) -> None:
    rewards, groups, rollouts, excluded = ([s[k] for s in samples] for k in range(4))
    got = leave_one_out_rewards(rewards, RewardGroups(groups, rollouts, excluded, population))
    for i, (reward, group, rollout, out) in enumerate(samples):
        members = population_values(samples, group, population)
        others = [value for other, own in members.items() if other != rollout for value in own]
        expected = 0.0
        if not out and others:
            expected = (reward if reward in members[rollout] else members[rollout][0]) - statistics.fmean(others)
        assert got[i] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("function", [normalize_group_rewards, leave_one_out_rewards])
def test_excluded_samples_get_zero_and_do_not_affect_the_others(function) -> None:
    with_failure = function([1, 0, math.nan], RewardGroups([0, 0, 0], excluded=[False, False, True]))
    assert with_failure[:2] == function([1, 0], RewardGroups([0, 0]))
    assert with_failure[2] == 0.0


@pytest.mark.parametrize("function", [normalize_group_rewards, leave_one_out_rewards])
def test_single_samples_and_equal_rewards_give_zero(function) -> None:
    assert function([0.25] * 4, RewardGroups([0, 0, 0, 7])) == [0.0] * 4


@pytest.mark.parametrize("function", [normalize_group_rewards, leave_one_out_rewards])
def test_rejects_different_numbers_of_rewards_and_groups(function) -> None:
    with pytest.raises(ValueError, match="2 rewards but 1 group indices"):
        function([1.0, 2.0], RewardGroups([0]))


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


def test_no_penalty_without_a_buffer() -> None:
    assert overlong_penalties([5, 100], max_len=10, buffer_len=0, penalty=1.0) == [0.0, 0.0]
