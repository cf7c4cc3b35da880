"""Group-relative rewards.

Invariant: statistics go by group index, whatever the group sizes are, and a sample that is excluded (its rollout
failed) neither changes the mean and deviation of its group nor receives anything but zero.

GRPO (Shao et al. 2024, "DeepSeekMath", eq. 3-4): r_i = (R_i - mean(R_group)) / (std(R_group) + 1e-6), with the unbiased
standard deviation. Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training") leaves the division out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

STD_EPSILON = 1e-6


def group_members(
    rewards: Sequence[float], group_indices: Sequence[Hashable], excluded: Sequence[bool] | None
) -> list[list[int]]:
    """The positions of each group's members, without the excluded ones."""
    if len(rewards) != len(group_indices):
        raise ValueError(f"{len(rewards)} rewards but {len(group_indices)} group indices")
    skip = [False] * len(rewards) if excluded is None else list(excluded)
    members: dict[Hashable, list[int]] = {}
    for position, group in enumerate(group_indices):
        if not skip[position]:
            members.setdefault(group, []).append(position)
    return list(members.values())


def normalize_group_rewards(
    rewards: Sequence[float],
    group_indices: Sequence[Hashable],
    *,
    divide_by_std: bool = True,
    excluded: Sequence[bool] | None = None,
) -> list[float]:
    """Centre each reward on its group, and scale it by the group's deviation when the group has several members."""
    normalized = [0.0] * len(rewards)
    for positions in group_members(rewards, group_indices, excluded):
        values = np.asarray([rewards[position] for position in positions], dtype=np.float64)
        centred = values - values.mean()
        if divide_by_std and len(values) > 1:
            centred = centred / (values.std(ddof=1) + STD_EPSILON)
        for position, value in zip(positions, centred, strict=True):
            normalized[position] = float(value)
    return normalized
