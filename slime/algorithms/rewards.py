"""Group-relative rewards.

Invariant: statistics go by group index, whatever the group sizes are, and a reward is compared with the mean and the
deviation of one population, to which it belongs: so no result is larger than sqrt(n), n the samples of the group. A
sample that is excluded (its rollout failed) neither changes the statistics of its group nor receives anything but zero.

The population of a group whose rollouts were split into several samples (they share a rollout id):
    rollouts    each rollout counts once, with the mean reward of its samples, and all its samples get its result
    samples     each sample counts, with its own reward
    auto        samples, if the samples of one of the group's rollouts have rewards that differ, else rollouts;
                rewards as they are before a penalty for length, which differs with the length of each sample

GRPO (Shao et al. 2024, "DeepSeekMath", eq. 3-4): r_i = (R_i - mean(R_group)) / (std(R_group) + 1e-6), with the unbiased
standard deviation. Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training") leaves the division out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

STD_EPSILON = 1e-6
POPULATIONS = ("auto", "rollouts", "samples")


@dataclass(frozen=True)
class RewardGroup:
    """One group: the positions of the samples of each of its rollouts, and what each of them is compared by."""

    positions: list[list[int]]
    values: list[list[float]]
    counts_rollouts: bool


def reward_groups(
    rewards: Sequence[float],
    group_indices: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None,
    excluded: Sequence[bool] | None,
    population: str,
    before_penalty: Sequence[float] | None = None,
) -> list[RewardGroup]:
    """The groups without their excluded samples; without `rollout_ids` every sample is a rollout of its own."""
    if len(rewards) != len(group_indices):
        raise ValueError(f"{len(rewards)} rewards but {len(group_indices)} group indices")
    rollouts = range(len(rewards)) if rollout_ids is None else rollout_ids
    skip = [False] * len(rewards) if excluded is None else excluded
    members: dict[Hashable, dict[Hashable, list[int]]] = {}
    for position, (group, rollout, out) in enumerate(zip(group_indices, rollouts, skip, strict=True)):
        if not out:
            members.setdefault(group, {}).setdefault(rollout, []).append(position)
    judged = rewards if before_penalty is None else before_penalty
    return [_group(rewards, judged, list(group.values()), population) for group in members.values()]


def _group(
    rewards: Sequence[float], judged: Sequence[float], positions: list[list[int]], population: str
) -> RewardGroup:
    earned = [[float(rewards[i]) for i in own] for own in positions]
    counts_rollouts = population == "rollouts"
    if population == "auto":
        counts_rollouts = all(judged[i] == judged[own[0]] for own in positions for i in own)
    if counts_rollouts:
        earned = [[_mean(own)] * len(own) for own in earned]
    return RewardGroup(positions, earned, counts_rollouts)


def _mean(rewards: Sequence[float]) -> float:
    """Equal rewards have themselves as mean, without rounding."""
    return rewards[0] if min(rewards) == max(rewards) else sum(rewards) / len(rewards)


def normalize_group_rewards(
    rewards: Sequence[float],
    group_indices: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None = None,
    *,
    population: str = "auto",
    divide_by_std: bool = True,
    excluded: Sequence[bool] | None = None,
    before_penalty: Sequence[float] | None = None,
) -> list[float]:
    """Centre each reward on its group, and scale it by the group's deviation where there are several members."""
    if len(rewards) != len(group_indices):
        raise ValueError(f"{len(rewards)} rewards but {len(group_indices)} group indices")
    normalized = np.zeros(len(rewards))
    if rollout_ids is None or len(set(rollout_ids)) == len(rewards):  # as nearly always: a rollout is one sample
        kept = np.arange(len(rewards)) if excluded is None else np.flatnonzero(~np.array(excluded, dtype=bool))
        values, group = np.array(rewards, dtype=np.float64)[kept], _numbered(group_indices)[kept]
        counted, counted_in = values, group
    else:
        groups = reward_groups(rewards, group_indices, rollout_ids, excluded, population, before_penalty)
        kept, values, group = _columns(groups, once=False)
        _, counted, counted_in = _columns(groups, once=True)
    means, scales = _statistics(counted, counted_in, divide_by_std=divide_by_std)
    normalized[kept] = (values - means[group]) / scales[group]
    return normalized.tolist()


def _numbered(ids: Sequence[Hashable]) -> np.ndarray:
    """Equal ids as equal whole numbers from 0 on."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(one, len(numbers)) for one in ids], dtype=np.int64)


def _columns(groups: Sequence[RewardGroup], *, once: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(position, value, number of its group) of each sample, or `once` for each member of the population."""
    rows = []
    for number, group in enumerate(groups):
        last = 1 if once and group.counts_rollouts else None
        for positions, values in zip(group.positions, group.values, strict=True):
            rows += [(position, value, number) for position, value in zip(positions[:last], values[:last], strict=True)]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return table[:, 0].astype(np.int64), table[:, 1], table[:, 2].astype(np.int64)


def _statistics(counted: np.ndarray, group: np.ndarray, *, divide_by_std: bool) -> tuple[np.ndarray, np.ndarray]:
    """Of each group, by its number, the mean and what to divide by; of one that has nothing 0 and 1."""
    counts = np.bincount(group) if len(group) else np.zeros(0, dtype=np.int64)
    means, scales = np.zeros(len(counts)), np.ones(len(counts))
    in_order, begins = counted[np.argsort(group, kind="stable")], np.cumsum(counts) - counts
    for size in np.unique(counts[counts > 0]).tolist():  # groups of one size at once: a call for each would take long
        alike = np.flatnonzero(counts == size)
        table = in_order[begins[alike][:, None] + np.arange(size)]
        means[alike] = table.mean(axis=1)
        if divide_by_std and size > 1:
            scales[alike] = table.std(axis=1, ddof=1) + STD_EPSILON
    return means, scales


# Responses that come close to the length limit lose reward.
#
# DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), with M the limit, B the buffer, p the penalty:
#     0                      L <= M - B
#     -p (L - (M - B)) / B   M - B < L <= M
#     -p                     L > M
# A buffer of 0 is no shaping at all.


def overlong_penalties(
    response_lengths: Sequence[int], *, max_len: int, buffer_len: int, penalty: float
) -> list[float]:
    """What is added to each sample's reward: between -penalty and 0."""
    if buffer_len <= 0:
        return [0.0] * len(response_lengths)
    free = max_len - buffer_len
    return [-penalty * min(max(length - free, 0) / buffer_len, 1.0) for length in response_lengths]
