"""Numbers into k bins of nearly equal sums: the largest differencing method (Karmarkar and Karp 1982).

Every number starts as a partition of its own. The two partitions with the largest spread (heaviest minus lightest bin)
are merged, heaviest bins onto lightest, until one is left. With `equal_size` numbers start k at a time, neighbours in
size together, one in each bin; every merge then keeps the bins equally full. What a heavy number costs its bin there
is won back by swaps with lighter bins, while they lower the heaviest.

A partition lists only the bins that hold something, so a number that joins one costs no walk through all k.

Invariant: every index is in exactly one bin, the same input gives the same bins, and with `equal_size` the bins' sizes
differ by at most one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Any

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
