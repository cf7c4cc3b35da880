"""Assigns the samples of a batch to optimizer steps, ranks and micro-batches.

Invariant: every trainable sample of a full step appears exactly once, all samples of one rollout are in one optimizer
step, and in each step every rank has the same number of micro-batches (some may be empty). Rollouts that do not fill a
step are listed, not dropped. Pure Python: the driver computes the schedule and the ranks follow it. No computation
takes time proportional to samples times micro-batches or samples times ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Members = int | tuple["Members", "Members"]
"""The indices in a bin: one index, or a pair of such members, nested."""
Bin = tuple[float, Members]
"""The sum of a bin, and its indices."""
SWAP_TOLERANCE = 1.001
"""Swaps stop when the heaviest bin is at most this factor above the mean."""


def partition(weights: Sequence[float], k: int, *, equal_size: bool) -> list[list[int]]:
    """Partition numbers into `k` bins of nearly equal sums by the largest differencing method (Karmarkar, Karp 1982).

    Returns the indices of `weights`, heaviest bin first, each bin in ascending order; bins may be empty.

    Every number starts as a partition of its own. The two partitions with the largest spread (heaviest minus lightest
    bin) are merged, heaviest bins onto lightest, until one is left. With `equal_size`, partitions start with k numbers
    of similar size, one in each bin, so every merge keeps the bins equally full; afterwards swaps with lighter bins
    lower the heaviest bin. A partition lists only its non-empty bins, so merging a single number does not walk through
    all k bins.

    Invariant: every index is in exactly one bin, the same input gives the same bins, and with `equal_size` the bins'
    sizes differ by at most one.
    """
    if k < 1:
        raise ValueError(f"numbers cannot be partitioned into {k} bins")
    heaviest_first = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    at_once = k if equal_size else 1
    heap: list[tuple[float, int, list[Bin]]] = []
    for order, begin in enumerate(range(0, len(weights), at_once)):
        heap.append(_entry([(weights[i], i) for i in heaviest_first[begin : begin + at_once]], k, order))
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        widest, next_widest = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        heapq.heappush(heap, _entry(_merge_partitions(widest, next_widest, k), k, order))
        order += 1
    parted: list[list[int]] = [[] for _ in range(k)]
    for place, (_, members) in enumerate(heap[0][2] if heap else ()):
        left = [members]
        while left:  # the bin's members are nested pairs
            one = left.pop()
            if isinstance(one, tuple):
                left += one
            else:
                parted[place].append(one)
    if equal_size:
        _swap_numbers(parted, weights)
    return sorted((sorted(members) for members in parted), key=lambda members: (-_sum(members, weights), members))


def _merge_partitions(widest: list[Bin], other: list[Bin], k: int) -> list[Bin]:
    """Merge the heaviest bins of one partition onto the lightest of the other; heaviest first."""
    if len(other) == 1:  # onto an empty bin or the lightest one; the order of the rest does not change
        total, members = other[0]
        if len(widest) == k:
            lightest, held = widest.pop()
            total, members = lightest + total, (held, members)
        widest.insert(bisect_right(widest, -total, key=lambda entry: -entry[0]), (total, members))
        return widest
    alone = k - len(other)  # this many bins of `widest` meet an empty bin
    met = [(a + b, (one, two)) for (a, one), (b, two) in zip(widest[alone:], reversed(other), strict=False)]
    rest = other[: len(other) - len(met)]
    return sorted([*widest[:alone], *met, *reversed(rest)], key=lambda entry: -entry[0])


def _entry(bins: list[Bin], k: int, order: int) -> tuple[float, int, list[Bin]]:
    """Make a heap entry: the widest spread comes first, then the oldest; `bins` are sorted."""
    lightest = bins[-1][0] if len(bins) == k else 0.0
    return lightest - bins[0][0], order, bins


def _swap_numbers(bins: list[list[int]], weights: Sequence[float]) -> None:
    """Lighten the heaviest bin by swaps with the lightest bin that helps; at most one swap per number."""
    sums = [_sum(members, weights) for members in bins]
    enough = SWAP_TOLERANCE * sum(sums) / len(bins)
    lightest_first = sorted((total, b) for b, total in enumerate(sums))
    spans = [_span(members, weights) for members in bins]
    for _ in range(len(weights)):
        heaviest, top = lightest_first.pop()
        if heaviest <= enough:
            return
        own = sorted(weights[i] for i in bins[top])
        for light, other in lightest_first:
            least, most = spans[other]
            above = bisect_right(own, least)  # swapped numbers differ by more than 0, less than the difference
            if above == len(own) or own[above] >= most + (heaviest - light):
                continue
            swap = _best_swap(bins[top], bins[other], weights, heaviest - light)
            if swap is not None:
                break
        else:
            return
        mine, theirs = swap
        bins[top][bins[top].index(mine)], bins[other][bins[other].index(theirs)] = theirs, mine
        del lightest_first[bisect_left(lightest_first, (light, other))]
        for changed in (top, other):  # insert instead of sorting everything again, which would take most of the time
            insort(lightest_first, (_sum(bins[changed], weights), changed))
            spans[changed] = _span(bins[changed], weights)


def _best_swap(
    heavy: Sequence[int], light: Sequence[int], weights: Sequence[float], difference: float
) -> tuple[int, int] | None:
    """Find the swap that brings the sums of two bins closest to each other; None if no swap brings them closer."""
    ordered = sorted((weights[j], j) for j in light)
    best = (difference, -1, -1)
    for i in heavy:  # the best partner weighs half the difference less: look on both sides of that
        above = bisect_left(ordered, (weights[i] - difference / 2,))
        below = bisect_left(ordered, (ordered[above - 1][0],)) if above else above
        for weight, j in {ordered[place] for place in (below, above) if place < len(ordered)}:
            best = min(best, (abs(difference - 2 * (weights[i] - weight)), i, j))
    left, mine, theirs = best
    return (mine, theirs) if left < difference * (1 - 1e-9) else None


def _span(members: Sequence[int], weights: Sequence[float]) -> tuple[float, float]:
    own = [weights[i] for i in members]
    return min(own, default=0.0), max(own, default=0.0)


def _sum(members: Sequence[int], weights: Sequence[float]) -> float:
    return sum(weights[i] for i in members)


MicroBatchIndices = list[int]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class StepPlan:
    """Plan of one optimizer step: `ranks[r][k]` has the positions in micro-batch k of rank r."""

    num_rollouts: int
    ranks: list[list[MicroBatchIndices]]

    @property
    def positions(self) -> list[int]:
        return [position for micro_batches in self.ranks for members in micro_batches for position in members]


@dataclass(frozen=True)
class Schedule:
    """The optimizer steps of a batch.

    `left_over` has the positions of the rollouts that are carried over because they do not fill a step, in order.
    """

    steps: list[StepPlan]
    left_over: list[int] = field(default_factory=list)

    def positions_of_rank(self, rank: int) -> list[int]:
        return [position for step in self.steps for micro_batch in step.ranks[rank] for position in micro_batch]


@dataclass(frozen=True)
class PromptGroups:
    """The group of each sample, whose samples share one prompt, and the number of tokens of that prompt."""

    groups: Sequence[int]
    lengths: Sequence[int]

    def computed(self, members: MicroBatchIndices, lengths: Sequence[int]) -> int:
        """Count the tokens of a micro-batch if each prompt is computed once for all its samples there."""
        seen: set[int] = set()
        total = 0
        for position in members:
            total += lengths[position]
            if self.groups[position] in seen:
                total -= self.lengths[position]
            seen.add(self.groups[position])
        return total


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
    prompts: PromptGroups | None = None,
) -> Schedule:
    """Plan steps of exactly `global_batch_size` rollouts; with `fill_last` the rest forms a smaller last step.

    Micro-batches are limited by samples or by `max_tokens`, and work is balanced over ranks by tokens. With `costs`
    (FLOPs of each sample) it is balanced by costs. With `by_flops` the micro-batches also have equal costs; their
    number is the one that `max_tokens` requires on average. Samples that are not `trainable` count as part of their
    rollout but are not assigned to any rank. With shared `prompts`, groups stay together where work is balanced by
    tokens, provided that this needs no more micro-batches and the ranks, which wait for each other, finish no later.
    """
    if by_flops and (costs is None or max_tokens is None):
        raise ValueError("micro-batches of equal FLOPs need the costs of the samples and a number of tokens")
    if len(set(rollout_ids)) == len(rollout_ids):
        rollouts = [[position] for position in range(len(rollout_ids))]
    else:
        members: dict[int, list[int]] = {}
        for position, rollout_id in enumerate(rollout_ids):
            members.setdefault(rollout_id, []).append(position)
        rollouts = list(members.values())
    whole = len(rollouts) if fill_last else len(rollouts) - len(rollouts) % global_batch_size
    steps = []
    for begin in range(0, whole, global_batch_size):
        chosen = rollouts[begin : min(begin + global_batch_size, whole)]
        positions = [p for rollout in chosen for p in rollout]
        if trainable is not None:
            positions = [p for p in positions if trainable[p]]
        if costs is None:
            ranks = assign_by_tokens(positions, lengths, num_ranks, micro_batch_size, max_tokens, prompts)
        else:
            limit = max_tokens if by_flops else None
            ranks = assign_by_costs(positions, lengths, costs, num_ranks, micro_batch_size, max_tokens, limit)
        steps.append(StepPlan(num_rollouts=len(chosen), ranks=ranks))
    return Schedule(steps, left_over=sorted(p for rollout in rollouts[whole:] for p in rollout))


def assign_by_tokens(
    positions: Sequence[int],
    lengths: Sequence[int],
    num_ranks: int,
    micro_batch_size: int,
    max_tokens: int | None,
    prompts: PromptGroups | None = None,
) -> list[list[MicroBatchIndices]]:
    """Form the micro-batches of a step and assign them so that ranks get similar numbers of tokens.

    With `prompts` they are formed of whole groups, if none exceeds `max_tokens` or is empty, and the slowest ranks of
    all micro-batches compute no more tokens in all.
    """
    bins = pack_micro_batches(positions, lengths, num_ranks, micro_batch_size, max_tokens)
    apart = assign_to_ranks(bins, lengths, num_ranks)
    if prompts is None or max_tokens is None:
        return apart
    members: dict[int, MicroBatchIndices] = {}
    for position in positions:
        members.setdefault(prompts.groups[position], []).append(position)
    groups = list(members.values())
    if len(groups) < len(bins):
        return apart
    level = balance_bins(range(len(groups)), [_weight(group, lengths) for group in groups], len(bins))
    whole = [[position for group in chosen for position in groups[group]] for chosen in level]
    if max(_weight(chosen, lengths) for chosen in whole) > max_tokens:
        return apart
    together = assign_to_ranks(whole, lengths, num_ranks)
    slowest_together, slowest_apart = (
        sum(max(prompts.computed(one, lengths) for one in at_once) for at_once in zip(*ranks, strict=True))
        for ranks in (together, apart)
    )
    return together if slowest_together <= slowest_apart else apart


def assign_by_costs(
    positions: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    num_ranks: int,
    micro_batch_size: int,
    max_tokens: int | None,
    mean_tokens: int | None,
) -> list[list[MicroBatchIndices]]:
    """Assign samples to ranks by cost, then form the same number of micro-batches of each rank's samples.

    Each rank starts with its heaviest micro-batch, because ranks wait for each other in micro-batches of equal number.
    With `mean_tokens` the micro-batches have equal costs and that many tokens on average.
    """

    def parted(members: Sequence[int], count: int, *, equal_size: bool = False) -> list[MicroBatchIndices]:
        parts = partition([costs[p] for p in members], count, equal_size=equal_size)
        return [[members[i] for i in part] for part in parts]

    if mean_tokens is not None:
        count = max(1, -(-_weight(positions, lengths) // (mean_tokens * num_ranks)))
        return [parted(share, count) for share in parted(positions, num_ranks)]
    shares = parted(positions, num_ranks, equal_size=max_tokens is None)
    count = max(len(pack_micro_batches(share, lengths, 1, micro_batch_size, max_tokens)) for share in shares)
    ranks = [pack_micro_batches(share, lengths, count, micro_batch_size, max_tokens) for share in shares]
    return [sorted(bins, key=lambda members: (-_weight(members, costs), members)) for bins in ranks]


def pack_micro_batches(
    positions: Sequence[int], lengths: Sequence[int], multiple: int, micro_batch_size: int, max_tokens: int | None
) -> list[MicroBatchIndices]:
    """Form micro-batches of `micro_batch_size` samples, or of at most `max_tokens` tokens if that is given.

    Their number is a multiple of `multiple`.
    """
    if max_tokens is None:
        ordered = _longest_first(positions, lengths)
        bins = [ordered[begin : begin + micro_batch_size] for begin in range(0, len(ordered), micro_batch_size)]
        raise_to_multiple(bins, lengths, multiple)
        return bins
    bins = first_fit_bins(positions, lengths, max_tokens)
    are_alone = len(bins) == len(positions)
    raise_to_multiple(bins, lengths, multiple)
    if are_alone:
        return bins
    level = balance_bins(positions, lengths, len(bins))
    return level if max(_weight(members, lengths) for members in level) <= max_tokens else bins


def first_fit_bins(positions: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[MicroBatchIndices]:
    """Form micro-batches by first-fit decreasing; a sample longer than `max_tokens` gets its own micro-batch."""
    ordered = _longest_first(positions, lengths)
    alone = 0  # the number of samples that leave no room for the shortest one
    if ordered:
        most_beside = max_tokens - lengths[ordered[-1]]
        alone = bisect_left(ordered, True, key=lambda position: lengths[position] <= most_beside)
    bins: list[MicroBatchIndices] = [[position] for position in ordered[:alone]]
    first, rest = len(bins), ordered[alone:]
    # any two bins together exceed the limit of one, so there are fewer than twice as many bins as full ones
    most = min(len(rest), 2 * _weight(rest, lengths) // max_tokens + 1)
    size = 1 << max(most - 1, 0).bit_length()
    free = [-1] * (2 * size)  # a tree: entry i is the larger of 2i and 2i + 1, and bin first + i is entry size + i
    for position in rest:
        length = lengths[position]
        if free[1] >= length:
            node = 1
            while node < size:
                node += node
                if free[node] < length:
                    node += 1
            bins[first + node - size].append(position)
            left = free[node] - length
        else:
            node = size + len(bins) - first
            bins.append([position])
            left = max_tokens - length
        free[node] = left
        while node > 1:
            beside = free[node ^ 1]
            node >>= 1
            larger = left if left > beside else beside
            if free[node] == larger:
                break
            free[node] = left = larger
    return bins


def raise_to_multiple(bins: list[MicroBatchIndices], lengths: Sequence[int], num_ranks: int) -> None:
    """Raise the number of bins to a multiple of `num_ranks`: split the heaviest divisible bin, else add empty ones."""
    if bins and len(bins) % num_ranks == 0:
        return
    divisible = [(-_weight(members, lengths), i) for i, members in enumerate(bins) if len(members) > 1]
    heapq.heapify(divisible)
    while not bins or len(bins) % num_ranks:
        if not divisible:
            bins.append([])
            continue
        _, heaviest = heapq.heappop(divisible)
        places = (heaviest, len(bins))
        bins[heaviest], second = balance_bins(bins[heaviest], lengths, 2)
        bins.append(second)
        for place in places:
            if len(bins[place]) > 1:
                heapq.heappush(divisible, (-_weight(bins[place], lengths), place))


def balance_bins(positions: Sequence[int], lengths: Sequence[int], count: int) -> list[MicroBatchIndices]:
    """Form `count` bins of nearly equal weight: longest first, each into the lightest bin."""
    ordered = _longest_first(positions, lengths)
    bins: list[MicroBatchIndices] = [[position] for position in ordered[:count]]  # empty bins first
    bins += [[] for _ in range(count - len(bins))]
    rest = ordered[count:]
    by_weight = [(lengths[position], place) for place, position in enumerate(ordered[:count])] if rest else []
    heapq.heapify(by_weight)
    for position in rest:
        weight, lightest = by_weight[0]
        bins[lightest].append(position)
        heapq.heapreplace(by_weight, (weight + lengths[position], lightest))
    return bins


def assign_to_ranks(
    bins: Sequence[MicroBatchIndices], lengths: Sequence[int], num_ranks: int
) -> list[list[MicroBatchIndices]]:
    """Assign bins, heaviest first, each to the rank with the fewest tokens that still has a free place."""
    places = len(bins) // num_ranks
    ranks: list[list[MicroBatchIndices]] = [[] for _ in range(num_ranks)]
    with_a_place = [(0, rank) for rank in range(num_ranks)]
    weights = [_weight(members, lengths) for members in bins]
    firsts = [members[0] if members else -1 for members in bins]  # orders bins of equal weight; bins are disjoint
    for place in sorted(sorted(range(len(bins)), key=firsts.__getitem__), key=weights.__getitem__, reverse=True):
        load, rank = with_a_place[0]
        own = ranks[rank]
        own.append(bins[place])
        if len(own) < places:
            heapq.heapreplace(with_a_place, (load + weights[place], rank))
        else:
            heapq.heappop(with_a_place)
    return ranks


def _longest_first(positions: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Sort positions by length, descending; of equally long samples, the lower position comes first."""
    return sorted(sorted(positions), key=lengths.__getitem__, reverse=True)


def _weight(members: Sequence[int], weights: Sequence[Number]) -> Number:
    return weights[members[0]] if len(members) == 1 else sum([weights[position] for position in members])
