"""A rollout's baseline is what the others of its group earned.

RLOO (Ahmadian et al. 2024, "Back to Basics"): r_i = R_i - mean of R_j over the other rollouts j of its group.
Invariant: groups go by group index and count rollouts, a rollout of several samples once, with their mean reward; an
excluded sample (its rollout failed) counts for nobody and receives zero, and so does a rollout that is alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from slime.algorithms.rewards import reward_groups


def leave_one_out_rewards(
    rewards: Sequence[float],
    group_indices: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None = None,
    *,
    excluded: Sequence[bool] | None = None,
) -> list[float]:
    advantages = [0.0] * len(rewards)
    for group in reward_groups(rewards, group_indices, rollout_ids, excluded):
        if len(group.means) < 2:
            continue
        others = (group.means.sum() - group.means) / (len(group.means) - 1)
        for baseline, own in zip(others.tolist(), group.positions, strict=True):
            for position in own:
                advantages[position] = rewards[position] - baseline
    return advantages
