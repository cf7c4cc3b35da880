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
            means=np.array([sum(rewards[i] for i in own) / len(own) for own in group.values()], dtype=np.float64),
            positions=list(group.values()),
        )
        for group in members.values()
    ]


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
    for group in reward_groups(rewards, group_indices, rollout_ids, excluded):
        mean, scale = float(group.means.mean()), 1.0
        if divide_by_std and len(group.means) > 1:
            scale = float(group.means.std(ddof=1)) + STD_EPSILON
        for own in group.positions:
            for position in own:
                normalized[position] = (rewards[position] - mean) / scale
    return normalized
