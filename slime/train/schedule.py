"""Who computes what, in which order.

Invariant: every trainable sample appears exactly once, all samples of one rollout are in one optimizer step, and in
each step every rank has the same number of micro-batches (an empty one where there is nothing left to give). Pure
Python: the driver computes it, the ranks obey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MicroBatchIndices = list[int]


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step: `ranks[r][k]` are the positions in micro-batch k of rank r."""

    num_rollouts: int
    ranks: list[list[MicroBatchIndices]]

    @property
    def num_micro_batches(self) -> int:
        return len(self.ranks[0])


@dataclass(frozen=True)
class Schedule:
    steps: list[StepPlan]

    def positions_of_rank(self, rank: int) -> list[int]:
        return [position for step in self.steps for micro_batch in step.ranks[rank] for position in micro_batch]


def build_schedule(
    lengths: Sequence[int],
    rollout_ids: Sequence[int],
    *,
    num_ranks: int,
    global_batch_size: int,
    micro_batch_size: int = 1,
    max_tokens: int | None = None,
    trainable: Sequence[bool] | None = None,
) -> Schedule:
    """Steps of `global_batch_size` rollouts (the last may be smaller), cut by samples or by `max_tokens`.

    Samples that are not `trainable` count as part of their rollout and are given to nobody.
    """
    rollouts: dict[int, list[int]] = {}
    for position, rollout_id in enumerate(rollout_ids):
        rollouts.setdefault(rollout_id, []).append(position)
    members = list(rollouts.values())
    steps = []
    for begin in range(0, len(members), global_batch_size):
        chosen = members[begin : begin + global_batch_size]
        positions = [p for rollout in chosen for p in rollout if trainable is None or trainable[p]]
        if max_tokens is None:
            bins = fixed_size_bins(positions, lengths, micro_batch_size)
        else:
            bins = first_fit_bins(positions, lengths, max_tokens)
        even_out(bins, lengths, num_ranks)
        if max_tokens is not None:
            level = level_bins(positions, lengths, len(bins))
            bins = level if max(_weight(members, lengths) for members in level) <= max_tokens else bins
        steps.append(StepPlan(num_rollouts=len(chosen), ranks=assign_to_ranks(bins, lengths, num_ranks)))
    return Schedule(steps)


def fixed_size_bins(positions: Sequence[int], lengths: Sequence[int], size: int) -> list[MicroBatchIndices]:
    """Neighbours in length share a micro-batch."""
    ordered = sorted(positions, key=lambda p: (-lengths[p], p))
    return [ordered[begin : begin + size] for begin in range(0, len(ordered), size)]


def first_fit_bins(positions: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[MicroBatchIndices]:
    """First-fit decreasing; a sample longer than `max_tokens` gets a micro-batch of its own."""
    bins: list[MicroBatchIndices] = []
    room: list[int] = []
    for position in sorted(positions, key=lambda p: (-lengths[p], p)):
        length = lengths[position]
        place = next((i for i, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([position])
            room.append(max_tokens - length)
        else:
            bins[place].append(position)
            room[place] -= length
    return bins


def even_out(bins: list[MicroBatchIndices], lengths: Sequence[int], num_ranks: int) -> None:
    """Raise the number of bins to a multiple of `num_ranks`: split the heaviest divisible bin, else add empty ones."""
    while not bins or len(bins) % num_ranks:
        divisible = [i for i, members in enumerate(bins) if len(members) > 1]
        if not divisible:
            bins.append([])
            continue
        heaviest = max(divisible, key=lambda i: (_weight(bins[i], lengths), -i))
        halves: list[MicroBatchIndices] = [[], []]
        for position in sorted(bins[heaviest], key=lambda p: (-lengths[p], p)):
            min(halves, key=lambda half: _weight(half, lengths)).append(position)
        bins[heaviest] = halves[0]
        bins.append(halves[1])


def level_bins(positions: Sequence[int], lengths: Sequence[int], count: int) -> list[MicroBatchIndices]:
    """`count` bins of nearly equal weight: longest first, each into the lightest bin."""
    bins: list[MicroBatchIndices] = [[] for _ in range(count)]
    weights = [0] * count
    for position in sorted(positions, key=lambda p: (-lengths[p], p)):
        lightest = weights.index(min(weights))
        bins[lightest].append(position)
        weights[lightest] += lengths[position]
    return bins


def assign_to_ranks(
    bins: Sequence[MicroBatchIndices], lengths: Sequence[int], num_ranks: int
) -> list[list[MicroBatchIndices]]:
    """Heaviest first, each to the rank with the fewest tokens so far that still has a place."""
    places = len(bins) // num_ranks
    ranks: list[list[MicroBatchIndices]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for members in sorted(bins, key=lambda b: (-_weight(b, lengths), b)):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < places), key=lambda r: (loads[r], r))
        ranks[rank].append(members)
        loads[rank] += _weight(members, lengths)
    return ranks


def _weight(members: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[position] for position in members)
