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
    normalized = [0.0] * len(rewards)
    by_size: dict[int, list[RewardGroup]] = {}
    for group in reward_groups(rewards, group_indices, rollout_ids, excluded):
        by_size.setdefault(len(group.means), []).append(group)
    for size, groups in by_size.items():  # groups of one size at once: a call for each would take most of the time
        table = np.stack([group.means for group in groups])
        means, scales = table.mean(axis=1).tolist(), [1.0] * len(groups)
        if divide_by_std and size > 1:
            scales = (table.std(axis=1, ddof=1) + STD_EPSILON).tolist()
        for group, mean, scale in zip(groups, means, scales, strict=True):
            for own in group.positions:
                for position in own:
                    normalized[position] = (rewards[position] - mean) / scale
    return normalized
