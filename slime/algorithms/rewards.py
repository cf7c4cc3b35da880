"""Group-relative rewards, and penalties for overlong responses.

Invariant: statistics are computed by group index, for groups of any size, and a reward is compared with the mean and
the deviation of one population, to which it belongs. Therefore no result is larger than sqrt(n), n the samples of the
group. A sample that is excluded (its rollout failed) does not change the statistics of its group and receives zero.

The population of a group whose rollouts were split into several samples (they share a rollout id):
    rollouts    each rollout counts once, with the mean reward of its samples, and all its samples get its result
    samples     each sample counts, with its own reward
    auto        samples, if the samples of one of the group's rollouts have rewards that differ, else rollouts;
                compared are rewards before the penalty for length, which depends on the length of each sample

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
class RewardGroups:
    """The groups within which rewards are compared; without `rollout_ids` every sample is its own rollout."""

    group_indices: Sequence[Hashable]
    rollout_ids: Sequence[Hashable] | None = None
    excluded: Sequence[bool] | None = None
    population: str = "auto"
    divide_by_std: bool = True
    before_penalty: Sequence[float] | None = None
    """Rewards before the penalty for length, from which the population `auto` chooses; None: the rewards themselves."""


@dataclass(frozen=True)
class RewardGroup:
    """One group: for each of its rollouts, the positions of its samples and the values that are compared."""

    positions: list[list[int]]
    values: list[list[float]]
    counts_rollouts: bool


def reward_groups(rewards: Sequence[float], compared: RewardGroups) -> list[RewardGroup]:
    """Collect the groups without their excluded samples. The mean of equal rewards is that reward, without rounding."""
    group_indices, excluded = compared.group_indices, compared.excluded
    if len(rewards) != len(group_indices):
        raise ValueError(f"{len(rewards)} rewards but {len(group_indices)} group indices")
    rollouts = range(len(rewards)) if compared.rollout_ids is None else compared.rollout_ids
    skip = [False] * len(rewards) if excluded is None else excluded
    members: dict[Hashable, dict[Hashable, list[int]]] = {}
    for position, (group, rollout, out) in enumerate(zip(group_indices, rollouts, skip, strict=True)):
        if not out:
            members.setdefault(group, {}).setdefault(rollout, []).append(position)
    judged = rewards if compared.before_penalty is None else compared.before_penalty
    groups = []
    for samples in members.values():
        positions = list(samples.values())
        values = [[float(rewards[i]) for i in own] for own in positions]
        counts_rollouts = compared.population == "rollouts"
        if compared.population == "auto":
            counts_rollouts = all(judged[i] == judged[own[0]] for own in positions for i in own)
        if counts_rollouts:
            values = [[own[0] if min(own) == max(own) else sum(own) / len(own)] * len(own) for own in values]
        groups.append(RewardGroup(positions, values, counts_rollouts))
    return groups


def normalize_group_rewards(rewards: Sequence[float], compared: RewardGroups) -> list[float]:
    """Centre each reward on its group, and divide it by the group's standard deviation if it has several members."""
    group_indices, rollout_ids, excluded = compared.group_indices, compared.rollout_ids, compared.excluded
    if len(rewards) != len(group_indices):
        raise ValueError(f"{len(rewards)} rewards but {len(group_indices)} group indices")
    normalized = np.zeros(len(rewards))
    if rollout_ids is None or len(set(rollout_ids)) == len(rewards):  # the usual case: a rollout is one sample
        kept = np.arange(len(rewards)) if excluded is None else np.flatnonzero(~np.array(excluded, dtype=bool))
        numbers: dict[Hashable, int] = {}
        all_groups = np.array([numbers.setdefault(one, len(numbers)) for one in group_indices], dtype=np.int64)
        values, group = np.array(rewards, dtype=np.float64)[kept], all_groups[kept]
        counted, counted_in = values, group
    else:
        groups = reward_groups(rewards, compared)
        kept, values, group = _columns(groups, once=False)
        _, counted, counted_in = _columns(groups, once=True)
    counts = np.bincount(counted_in) if len(counted_in) else np.zeros(0, dtype=np.int64)
    means, scales = np.zeros(len(counts)), np.ones(len(counts))
    in_order, begins = counted[np.argsort(counted_in, kind="stable")], np.cumsum(counts) - counts
    for size in np.unique(counts[counts > 0]).tolist():  # vectorised over the groups of one size
        alike = np.flatnonzero(counts == size)
        table = in_order[begins[alike][:, None] + np.arange(size)]
        means[alike] = table.mean(axis=1)
        if compared.divide_by_std and size > 1:
            scales[alike] = table.std(axis=1, ddof=1) + STD_EPSILON
    normalized[kept] = (values - means[group]) / scales[group]
    return normalized.tolist()


def _columns(groups: Sequence[RewardGroup], *, once: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (position, value, number of its group) of each sample, or with `once` of each member of the population."""
    rows = []
    for number, group in enumerate(groups):
        last = 1 if once and group.counts_rollouts else None
        for positions, values in zip(group.positions, group.values, strict=True):
            rows += [(position, value, number) for position, value in zip(positions[:last], values[:last], strict=True)]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return table[:, 0].astype(np.int64), table[:, 1], table[:, 2].astype(np.int64)


def leave_one_out_rewards(rewards: Sequence[float], compared: RewardGroups) -> list[float]:
    """Subtract from each reward the mean reward of the other rollouts of its group.

    RLOO (Ahmadian et al. 2024, "Back to Basics"): r_i = R_i - mean of R_j over the other rollouts j of its group.
    Invariant: groups are formed by group index; rewards are compared within the population (rollouts, or the
    samples of the other rollouts). An excluded sample (its rollout failed) is not counted and receives zero; a
    rollout without others in its group receives zero too.
    """
    advantages = [0.0] * len(rewards)
    for group in reward_groups(rewards, compared):
        if len(group.positions) < 2:
            continue
        counted = [own[:1] if group.counts_rollouts else own for own in group.values]
        sums, counts = np.array([sum(own) for own in counted]), np.array([len(own) for own in counted])
        others = ((sums.sum() - sums) / (counts.sum() - counts)).tolist()
        for baseline, positions, values in zip(others, group.positions, group.values, strict=True):
            for position, value in zip(positions, values, strict=True):
                advantages[position] = value - baseline
    return advantages


def overlong_penalties(
    response_lengths: Sequence[int], *, max_len: int, buffer_len: int, penalty: float
) -> list[float]:
    """Return the penalty that is added to each sample's reward, between -penalty and 0.

    DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), with M the limit, B the buffer, p the penalty:
        0                      L <= M - B
        -p (L - (M - B)) / B   M - B < L <= M
        -p                     L > M
    A buffer of 0 turns it off.
    """
    if buffer_len <= 0:
        return [0.0] * len(response_lengths)
    free = max_len - buffer_len
    return [-penalty * min(max(length - free, 0) / buffer_len, 1.0) for length in response_lengths]
