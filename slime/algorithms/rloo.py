"""A sample's baseline is what its siblings earned.

RLOO (Ahmadian et al. 2024, "Back to Basics"): r_i = R_i - mean of R_j over the other samples j of its group.
Invariant: groups go by group index; an excluded sample (its rollout failed) is nobody's sibling and receives zero, and
so does a sample that has no siblings.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from slime.algorithms.rewards import group_members


def leave_one_out_rewards(
    rewards: Sequence[float], group_indices: Sequence[Hashable], *, excluded: Sequence[bool] | None = None
) -> list[float]:
    advantages = [0.0] * len(rewards)
    for positions in group_members(rewards, group_indices, excluded):
        if len(positions) < 2:
            continue
        values = np.asarray([rewards[position] for position in positions], dtype=np.float64)
        others = (values.sum() - values) / (len(values) - 1)
        for position, value in zip(positions, values - others, strict=True):
            advantages[position] = float(value)
    return advantages
