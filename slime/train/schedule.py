"""Who computes what, in which order.

Invariant: every sample of a full step that is trainable appears exactly once, all samples of one rollout are in one
optimizer step, and in each step every rank has the same number of micro-batches (an empty one where there is nothing
left to give). Rollouts that do not fill a step are named, not dropped. Pure Python: the driver computes it, the ranks
obey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from slime.train.partition import partition

MicroBatchIndices = list[int]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step: `ranks[r][k]` are the positions in micro-batch k of rank r."""

    num_rollouts: int
    ranks: list[list[MicroBatchIndices]]

    @property
    def num_micro_batches(self) -> int:
        return len(self.ranks[0])

    @property
    def positions(self) -> list[int]:
        return [position for micro_batches in self.ranks for members in micro_batches for position in members]


@dataclass(frozen=True)
class Schedule:
    """`left_over`: positions of the rollouts that wait for more to fill a step, in order."""

    steps: list[StepPlan]
    left_over: list[int] = field(default_factory=list)

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
    costs: Sequence[float] | None = None,
    by_flops: bool = False,
    fill_last: bool = False,
) -> Schedule:
    """Steps of exactly `global_batch_size` rollouts; with `fill_last` what remains makes a smaller last one.

    Micro-batches are cut by samples or by `max_tokens`, and work is shared out by tokens. With `costs` (FLOPs of each
    sample) it is shared out by those, and with `by_flops` also the micro-batches are made equal in them, as few as
    `max_tokens` asks for on average. Samples that are not `trainable` count as part of their rollout and are given to
    nobody.
    """
    if by_flops and (costs is None or max_tokens is None):
        raise ValueError("micro-batches of equal FLOPs need the costs of the samples and a number of tokens")
    rollouts: dict[int, list[int]] = {}
    for position, rollout_id in enumerate(rollout_ids):
        rollouts.setdefault(rollout_id, []).append(position)
    members = list(rollouts.values())
    whole = len(members) if fill_last else len(members) - len(members) % global_batch_size
    steps = []
    for begin in range(0, whole, global_batch_size):
        chosen = members[begin : min(begin + global_batch_size, whole)]
        positions = [p for rollout in chosen for p in rollout if trainable is None or trainable[p]]
        if costs is None:
            ranks = share_by_tokens(positions, lengths, num_ranks, micro_batch_size, max_tokens)
        elif by_flops and max_tokens is not None:
            ranks = equal_flops(positions, lengths, costs, num_ranks, max_tokens)
        else:
            ranks = share_by_flops(positions, lengths, costs, num_ranks, micro_batch_size, max_tokens)
        steps.append(StepPlan(num_rollouts=len(chosen), ranks=ranks))
    return Schedule(steps, left_over=sorted(p for rollout in members[whole:] for p in rollout))


def share_by_tokens(
    positions: Sequence[int], lengths: Sequence[int], num_ranks: int, micro_batch_size: int, max_tokens: int | None
) -> list[list[MicroBatchIndices]]:
    """Micro-batches of the whole step, handed out so that ranks get similar numbers of tokens."""
    bins = cut(positions, lengths, num_ranks, micro_batch_size, max_tokens)
    return assign_to_ranks(bins, lengths, num_ranks)


def share_by_flops(
    positions: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    num_ranks: int,
    micro_batch_size: int,
    max_tokens: int | None,
) -> list[list[MicroBatchIndices]]:
    """Samples to ranks by their costs, then each rank's samples into micro-batches, as many on every rank.

    Each rank begins with its heaviest micro-batch: ranks wait for each other within micro-batches of the same number.
    """
    shares = _parts(positions, costs, num_ranks, equal_size=max_tokens is None)
    count = max(len(cut(share, lengths, 1, micro_batch_size, max_tokens)) for share in shares)
    ranks = [cut(share, lengths, count, micro_batch_size, max_tokens) for share in shares]
    return [sorted(bins, key=lambda members: (-_weight(members, costs), members)) for bins in ranks]


def equal_flops(
    positions: Sequence[int], lengths: Sequence[int], costs: Sequence[float], num_ranks: int, max_tokens: int
) -> list[list[MicroBatchIndices]]:
    """Micro-batches of equal cost, which may exceed `max_tokens`; as many as the tokens of the step would fill."""
    count = max(1, -(-_weight(positions, lengths) // (max_tokens * num_ranks)))
    shares = _parts(positions, costs, num_ranks, equal_size=False)
    return [_parts(share, costs, count, equal_size=False) for share in shares]


def cut(
    positions: Sequence[int], lengths: Sequence[int], multiple: int, micro_batch_size: int, max_tokens: int | None
) -> list[MicroBatchIndices]:
    """Micro-batches of so many samples, or of at most so many tokens each; their number is a multiple of `multiple`."""
    if max_tokens is None:
        bins = fixed_size_bins(positions, lengths, micro_batch_size)
        even_out(bins, lengths, multiple)
        return bins
    bins = first_fit_bins(positions, lengths, max_tokens)
    even_out(bins, lengths, multiple)
    level = level_bins(positions, lengths, len(bins))
    return level if max(_weight(members, lengths) for members in level) <= max_tokens else bins


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


def _parts(
    positions: Sequence[int], costs: Sequence[float], count: int, *, equal_size: bool
) -> list[MicroBatchIndices]:
    parts = partition([costs[p] for p in positions], count, equal_size=equal_size)
    return [[positions[i] for i in part] for part in parts]


def _weight(members: Sequence[int], weights: Sequence[Number]) -> Number:
    return sum(weights[position] for position in members)
