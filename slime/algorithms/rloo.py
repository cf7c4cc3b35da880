"""A rollout's baseline is what the others of its group earned.

RLOO (Ahmadian et al. 2024, "Back to Basics"): r_i = R_i - mean of R_j over the other rollouts j of its group.
Invariant: groups go by group index; what is compared, and what the mean counts, is the population of `rewards.py`
(rollouts, or the samples of the other rollouts); an excluded sample (its rollout failed) counts for nobody and receives
zero, and so does a rollout that is alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from slime.algorithms.rewards import reward_groups


def leave_one_out_rewards(
    rewards: Sequence[float],
    group_indices: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None = None,
    *,
    population: str = "auto",
    excluded: Sequence[bool] | None = None,
    before_penalty: Sequence[float] | None = None,
) -> list[float]:
    advantages = [0.0] * len(rewards)
    for group in reward_groups(rewards, group_indices, rollout_ids, excluded, population, before_penalty):
        if len(group.positions) < 2:
            continue
        counted = [own[:1] if group.counts_rollouts else own for own in group.values]
        sums, counts = np.array([sum(own) for own in counted]), np.array([len(own) for own in counted])
        others = ((sums.sum() - sums) / (counts.sum() - counts)).tolist()
        for baseline, positions, values in zip(others, group.positions, group.values, strict=True):
            for position, value in zip(positions, values, strict=True):
                advantages[position] = value - baseline
    return advantages
