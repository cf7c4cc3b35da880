"""Numbers into k bins of nearly equal sums: the largest differencing method (Karmarkar and Karp 1982).

Every number starts as a partition of its own. The two partitions with the largest spread (heaviest minus lightest bin)
are merged, heaviest bins onto lightest, until one is left. With `equal_size` numbers start k at a time, neighbours in
size together, one in each bin; every merge then keeps the bins equally full. What a heavy number costs its bin there
is won back by swaps with lighter bins, while they lower the heaviest.

Invariant: every index is in exactly one bin, the same input gives the same bins, and with `equal_size` the bins' sizes
differ by at most one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Bin = tuple[float, list[int]]
CLOSE_ENOUGH = 1.001


def partition(weights: Sequence[float], k: int, *, equal_size: bool) -> list[list[int]]:
    """The indices of `weights` in `k` bins, heaviest bin first, each in ascending order; bins may be empty."""
    if k < 1:
        raise ValueError(f"numbers cannot be parted into {k} bins")
    heaviest_first = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    at_once = k if equal_size else 1
    heap: list[tuple[float, int, list[Bin]]] = []
    for order, begin in enumerate(range(0, len(weights), at_once)):
        bins: list[Bin] = [(weights[i], [i]) for i in heaviest_first[begin : begin + at_once]]
        bins += [(0.0, []) for _ in range(k - len(bins))]
        heap.append(_entry(bins, order))
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        widest, next_widest = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + b, one + two) for (a, one), (b, two) in zip(widest, reversed(next_widest), strict=True)]
        heapq.heappush(heap, _entry(merged, order))
        order += 1
    parted = [members for _, members in heap[0][2]] if heap else [[] for _ in range(k)]
    if equal_size:
        _swap(parted, weights)
    return sorted((sorted(members) for members in parted), key=lambda members: (-_sum(members, weights), members))


def _entry(bins: list[Bin], order: int) -> tuple[float, int, list[Bin]]:
    """What the heap sorts by: the widest spread, then the oldest."""
    bins = sorted(bins, key=lambda entry: -entry[0])
    return bins[-1][0] - bins[0][0], order, bins


def _swap(bins: list[list[int]], weights: Sequence[float]) -> None:
    """Lighten the heaviest bin by swaps with the lightest bin that helps; at most one for each number."""
    sums = [_sum(members, weights) for members in bins]
    enough = CLOSE_ENOUGH * sum(sums) / len(bins)
    for _ in range(len(weights)):
        lightest_first = sorted(range(len(bins)), key=lambda b: (sums[b], b))
        top = lightest_first.pop()
        if sums[top] <= enough:
            return
        for other in lightest_first:
            swap = _best_swap(bins[top], bins[other], weights, sums[top] - sums[other])
            if swap is not None:
                break
        else:
            return
        mine, theirs = swap
        bins[top][bins[top].index(mine)], bins[other][bins[other].index(theirs)] = theirs, mine
        sums[top], sums[other] = _sum(bins[top], weights), _sum(bins[other], weights)


def _best_swap(
    heavy: Sequence[int], light: Sequence[int], weights: Sequence[float], difference: float
) -> tuple[int, int] | None:
    """The swap that leaves the two bins closest to each other, if one brings them closer at all."""
    swaps = ((abs(difference - 2 * (weights[i] - weights[j])), i, j) for i in heavy for j in light)
    left, mine, theirs = min(swaps, default=(difference, -1, -1))
    return (mine, theirs) if left < difference * (1 - 1e-9) else None


def _sum(members: Sequence[int], weights: Sequence[float]) -> float:
    return sum(weights[i] for i in members)
