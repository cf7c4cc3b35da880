"""Group-relative rewards.

Invariant: statistics go by group index and count rollouts, whatever the group sizes are and however many samples a
rollout was split into: its reward in them is the mean over its samples. A sample that is excluded (its rollout failed)
neither changes the mean and deviation of its group nor receives anything but zero.

GRPO (Shao et al. 2024, "DeepSeekMath", eq. 3-4): r_i = (R_i - mean(R_group)) / (std(R_group) + 1e-6), with the unbiased
standard deviation. Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training") leaves the division out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class RewardGroup:
    """One group: the reward of each of its rollouts, and where their samples are."""

    means: np.ndarray  # [rollouts], float64
    positions: list[list[int]]  # of each rollout's samples


def reward_groups(
    rewards: Sequence[float],
    group_indices: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None,
    excluded: Sequence[bool] | None,
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
    return [
        RewardGroup(
            means=np.array([_mean([rewards[i] for i in own]) for own in group.values()], dtype=np.float64),
            positions=list(group.values()),
        )
        for group in members.values()
    ]


def _mean(rewards: Sequence[float]) -> float:
    return sum(rewards) / len(rewards)


def normalize_group_rewards(
    rewards: Sequence[float],
    group_indices: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None = None,
    *,
    divide_by_std: bool = True,
    excluded: Sequence[bool] | None = None,
) -> list[float]:
    """Centre each reward on its group, and scale it by the group's deviation when the group has several rollouts."""
    if len(rewards) != len(group_indices):
        raise ValueError(f"{len(rewards)} rewards but {len(group_indices)} group indices")
    given, normalized = np.array(rewards, dtype=np.float64), np.zeros(len(rewards))
    kept = np.arange(len(given)) if excluded is None else np.flatnonzero(~np.array(excluded, dtype=bool))
    group = _numbered(group_indices)[kept]
    if rollout_ids is None or len(set(rollout_ids)) == len(given):  # as nearly always: a rollout is one sample
        earned, earned_in = given[kept], group
    else:
        earned, earned_in = _by_rollout(rewards, group.tolist(), [rollout_ids[i] for i in kept.tolist()], kept.tolist())
    means, scales = _statistics(earned, earned_in, divide_by_std=divide_by_std)
    normalized[kept] = (given[kept] - means[group]) / scales[group]
    return normalized.tolist()


def _numbered(ids: Sequence[Hashable]) -> np.ndarray:
    """Equal ids as equal whole numbers from 0 on."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(one, len(numbers)) for one in ids], dtype=np.int64)


def _by_rollout(
    rewards: Sequence[float], groups: Sequence[int], rollout_ids: Sequence[Hashable], positions: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """What each rollout earned, the mean over its samples, and in which group."""
    members: dict[tuple[int, Hashable], list[float]] = {}
    for group, rollout, position in zip(groups, rollout_ids, positions, strict=True):
        members.setdefault((group, rollout), []).append(rewards[position])
    means = np.array([_mean(own) for own in members.values()], dtype=np.float64)
    return means, np.array([group for group, _ in members], dtype=np.int64)


def _statistics(earned: np.ndarray, group: np.ndarray, *, divide_by_std: bool) -> tuple[np.ndarray, np.ndarray]:
    """Of each group, by its number, the mean and what to divide by; of one that has nothing 0 and 1."""
    counts = np.bincount(group) if len(group) else np.zeros(0, dtype=np.int64)
    means, scales = np.zeros(len(counts)), np.ones(len(counts))
    in_order, begins = earned[np.argsort(group, kind="stable")], np.cumsum(counts) - counts
    for size in np.unique(counts[counts > 0]).tolist():  # groups of one size at once: a call for each would take long
        alike = np.flatnonzero(counts == size)
        table = in_order[begins[alike][:, None] + np.arange(size)]
        means[alike] = table.mean(axis=1)
        if divide_by_std and size > 1:
            scales[alike] = table.std(axis=1, ddof=1) + STD_EPSILON
    return means, scales
