"""Who computes what, in which order.

Invariant: every sample of a full step that is trainable appears exactly once, all samples of one rollout are in one
optimizer step, and in each step every rank has the same number of micro-batches (an empty one where there is nothing
left to give). Rollouts that do not fill a step are named, not dropped. Pure Python: the driver computes it, the ranks
obey. Nothing takes samples times micro-batches or samples times ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

# Numbers into k bins of nearly equal sums: the largest differencing method (Karmarkar and Karp 1982).
#
# Every number starts as a partition of its own. The two partitions with the largest spread (heaviest minus lightest
# bin) are merged, heaviest bins onto lightest, until one is left. With `equal_size` numbers start k at a time,
# neighbours in size together, one in each bin; every merge then keeps the bins equally full. What a heavy number costs
# its bin there is won back by swaps with lighter bins, while they lower the heaviest.
#
# A partition lists only the bins that hold something, so a number that joins one costs no walk through all k.
#
# Invariant: every index is in exactly one bin, the same input gives the same bins, and with `equal_size` the bins'
# sizes differ by at most one.

Bin = tuple[float, Any]
"""Its sum, and its numbers: an index, or a pair of such, nested."""
CLOSE_ENOUGH = 1.001


def partition(weights: Sequence[float], k: int, *, equal_size: bool) -> list[list[int]]:
    """The indices of `weights` in `k` bins, heaviest bin first, each in ascending order; bins may be empty."""
    if k < 1:
        raise ValueError(f"numbers cannot be parted into {k} bins")
    heaviest_first = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    at_once = k if equal_size else 1
    heap: list[tuple[float, int, list[Bin]]] = []
    for order, begin in enumerate(range(0, len(weights), at_once)):
        heap.append(_entry([(weights[i], i) for i in heaviest_first[begin : begin + at_once]], k, order))
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        widest, next_widest = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        heapq.heappush(heap, _entry(_merged(widest, next_widest, k), k, order))
        order += 1
    parted = [_flat(members) for _, members in heap[0][2]] if heap else []
    parted += [[] for _ in range(k - len(parted))]
    if equal_size:
        _swap(parted, weights)
    return sorted((sorted(members) for members in parted), key=lambda members: (-_sum(members, weights), members))


def _merged(widest: list[Bin], other: list[Bin], k: int) -> list[Bin]:
    """Heaviest bins of one onto the lightest of the other, heaviest first again."""
    if len(other) == 1:  # onto an empty bin or the lightest one; the rest stays in its order
        total, members = other[0]
        if len(widest) == k:
            lightest, held = widest.pop()
            total, members = lightest + total, (held, members)
        widest.insert(bisect_right(widest, -total, key=lambda entry: -entry[0]), (total, members))
        return widest
    alone = k - len(other)  # so many of `widest` meet an empty bin
    met = [(a + b, (one, two)) for (a, one), (b, two) in zip(widest[alone:], reversed(other), strict=False)]
    rest = other[: len(other) - len(met)]
    return sorted([*widest[:alone], *met, *reversed(rest)], key=lambda entry: -entry[0])


def _entry(bins: list[Bin], k: int, order: int) -> tuple[float, int, list[Bin]]:
    """What the heap sorts by: the widest spread, then the oldest; `bins` are sorted."""
    lightest = bins[-1][0] if len(bins) == k else 0.0
    return lightest - bins[0][0], order, bins


def _flat(members: Any) -> list[int]:
    found, left = [], [members]
    while left:
        one = left.pop()
        if isinstance(one, tuple):
            left += one
        else:
            found.append(one)
    return found


def _swap(bins: list[list[int]], weights: Sequence[float]) -> None:
    """Lighten the heaviest bin by swaps with the lightest bin that helps; at most one for each number."""
    sums = [_sum(members, weights) for members in bins]
    enough = CLOSE_ENOUGH * sum(sums) / len(bins)
    lightest_first = sorted((total, b) for b, total in enumerate(sums))
    spans = [_span(members, weights) for members in bins]
    for _ in range(len(weights)):
        heaviest, top = lightest_first.pop()
        if heaviest <= enough:
            return
        own = sorted(weights[i] for i in bins[top])
        for light, other in lightest_first:
            least, most = spans[other]
            above = bisect_right(own, least)  # what is swapped is heavier than the other, by less than the difference
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
        for changed in (top, other):  # the rest stays in its order: sorting it again would take most of the time
            insort(lightest_first, (_sum(bins[changed], weights), changed))
            spans[changed] = _span(bins[changed], weights)


def _best_swap(
    heavy: Sequence[int], light: Sequence[int], weights: Sequence[float], difference: float
) -> tuple[int, int] | None:
    """The swap that leaves the two bins closest to each other, if one brings them closer at all."""
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


@dataclass(frozen=True)
class Prompts:
    """Of each sample: its group, all of which has one prompt, and the tokens of that prompt."""

    groups: Sequence[int]
    lengths: Sequence[int]

    def computed(self, members: MicroBatchIndices, lengths: Sequence[int]) -> int:
        """Tokens of a micro-batch when a prompt is computed once for all samples of its group that are in it."""
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
    prompts: Prompts | None = None,
) -> Schedule:
    """Steps of exactly `global_batch_size` rollouts; with `fill_last` what remains makes a smaller last one.

    Micro-batches are cut by samples or by `max_tokens`, and work is shared out by tokens. With `costs` (FLOPs of each
    sample) it is shared out by those, and with `by_flops` also the micro-batches are made equal in them, as few as
    `max_tokens` asks for on average. Samples that are not `trainable` count as part of their rollout and are given to
    nobody. With `prompts` that are shared, groups are kept together where work is shared out by tokens, if as many
    micro-batches hold them so and the ranks, which wait for each other, are done no later.
    """
    if by_flops and (costs is None or max_tokens is None):
        raise ValueError("micro-batches of equal FLOPs need the costs of the samples and a number of tokens")
    members = _members(rollout_ids)
    whole = len(members) if fill_last else len(members) - len(members) % global_batch_size
    steps = []
    for begin in range(0, whole, global_batch_size):
        chosen = members[begin : min(begin + global_batch_size, whole)]
        positions = [p for rollout in chosen for p in rollout]
        if trainable is not None:
            positions = [p for p in positions if trainable[p]]
        if costs is None:
            ranks = share_by_tokens(positions, lengths, num_ranks, micro_batch_size, max_tokens, prompts)
        elif by_flops and max_tokens is not None:
            ranks = equal_flops(positions, lengths, costs, num_ranks, max_tokens)
        else:
            ranks = share_by_flops(positions, lengths, costs, num_ranks, micro_batch_size, max_tokens)
        steps.append(StepPlan(num_rollouts=len(chosen), ranks=ranks))
    return Schedule(steps, left_over=sorted(p for rollout in members[whole:] for p in rollout))


def _members(rollout_ids: Sequence[int]) -> list[list[int]]:
    """The positions of each rollout, in the order in which rollouts are named first."""
    if len(set(rollout_ids)) == len(rollout_ids):
        return [[position] for position in range(len(rollout_ids))]
    rollouts: dict[int, list[int]] = {}
    for position, rollout_id in enumerate(rollout_ids):
        rollouts.setdefault(rollout_id, []).append(position)
    return list(rollouts.values())


def share_by_tokens(
    positions: Sequence[int],
    lengths: Sequence[int],
    num_ranks: int,
    micro_batch_size: int,
    max_tokens: int | None,
    prompts: Prompts | None = None,
) -> list[list[MicroBatchIndices]]:
    """Micro-batches of the whole step, handed out so that ranks get similar numbers of tokens."""
    bins = cut(positions, lengths, num_ranks, micro_batch_size, max_tokens)
    apart = assign_to_ranks(bins, lengths, num_ranks)
    if prompts is None or max_tokens is None:
        return apart
    whole = whole_groups(positions, lengths, prompts.groups, len(bins), max_tokens)
    if whole is None:
        return apart
    together = assign_to_ranks(whole, lengths, num_ranks)
    return together if _waited_for(together, lengths, prompts) <= _waited_for(apart, lengths, prompts) else apart


def _waited_for(ranks: list[list[MicroBatchIndices]], lengths: Sequence[int], prompts: Prompts) -> int:
    """Tokens of the slowest rank in each micro-batch, added up."""
    return sum(max(prompts.computed(members, lengths) for members in at_once) for at_once in zip(*ranks, strict=True))


def whole_groups(
    positions: Sequence[int], lengths: Sequence[int], groups: Sequence[int], count: int, max_tokens: int
) -> list[MicroBatchIndices] | None:
    """`count` micro-batches, each of whole groups; None where one would be too full or empty."""
    members: dict[int, MicroBatchIndices] = {}
    for position in positions:
        members.setdefault(groups[position], []).append(position)
    if len(members) < count:
        return None
    each = list(members.values())
    level = level_bins(range(len(each)), [_weight(group, lengths) for group in each], count)
    bins = [[position for group in chosen for position in each[group]] for chosen in level]
    return bins if max(_weight(chosen, lengths) for chosen in bins) <= max_tokens else None


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
    are_alone = len(bins) == len(positions)
    even_out(bins, lengths, multiple)
    if are_alone:
        return bins
    level = level_bins(positions, lengths, len(bins))
    return level if max(_weight(members, lengths) for members in level) <= max_tokens else bins


def fixed_size_bins(positions: Sequence[int], lengths: Sequence[int], size: int) -> list[MicroBatchIndices]:
    """Neighbours in length share a micro-batch."""
    ordered = _longest_first(positions, lengths)
    return [ordered[begin : begin + size] for begin in range(0, len(ordered), size)]


def first_fit_bins(positions: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[MicroBatchIndices]:
    """First-fit decreasing; a sample longer than `max_tokens` gets a micro-batch of its own."""
    ordered = _longest_first(positions, lengths)
    alone = _too_long_to_share(ordered, lengths, max_tokens)
    bins: list[MicroBatchIndices] = [[position] for position in ordered[:alone]]
    first, rest = len(bins), ordered[alone:]
    # any two bins hold more than one may, so there are fewer than twice as many as would be full
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


def _too_long_to_share(ordered: Sequence[int], lengths: Sequence[int], max_tokens: int) -> int:
    """How many of these, longest first, leave no room for the shortest beside them."""
    if not ordered:
        return 0
    most = max_tokens - lengths[ordered[-1]]
    return bisect_left(ordered, True, key=lambda position: lengths[position] <= most)


def even_out(bins: list[MicroBatchIndices], lengths: Sequence[int], num_ranks: int) -> None:
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
        bins[heaviest], second = level_bins(bins[heaviest], lengths, 2)
        bins.append(second)
        for place in places:
            if len(bins[place]) > 1:
                heapq.heappush(divisible, (-_weight(bins[place], lengths), place))


def level_bins(positions: Sequence[int], lengths: Sequence[int], count: int) -> list[MicroBatchIndices]:
    """`count` bins of nearly equal weight: longest first, each into the lightest bin."""
    ordered = _longest_first(positions, lengths)
    bins: list[MicroBatchIndices] = [[position] for position in ordered[:count]]  # into empty ones, while there are
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
    """Heaviest first, each to the rank with the fewest tokens so far that still has a place."""
    places = len(bins) // num_ranks
    ranks: list[list[MicroBatchIndices]] = [[] for _ in range(num_ranks)]
    with_a_place = [(0, rank) for rank in range(num_ranks)]
    weights = [_weight(members, lengths) for members in bins]
    firsts = [members[0] if members else -1 for members in bins]  # what is in two of them differs
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
    """Of equally long ones the first comes first."""
    return sorted(sorted(positions), key=lengths.__getitem__, reverse=True)


def _parts(
    positions: Sequence[int], costs: Sequence[float], count: int, *, equal_size: bool
) -> list[MicroBatchIndices]:
    parts = partition([costs[p] for p in positions], count, equal_size=equal_size)
    return [[positions[i] for i in part] for part in parts]


def _weight(members: Sequence[int], weights: Sequence[Number]) -> Number:
    return weights[members[0]] if len(members) == 1 else sum([weights[position] for position in members])
