"""Discounted sums of what is still to come.

    G_t = sum_k gamma^k r_{t+k}
by doubling: with S_n(t) the sum of the first n terms, S_2n(t) = S_n(t) + gamma^n S_n(t + n). That is log2(T) passes
over the whole tensor instead of T dependent steps, and sums of as many terms are added, which rounds little.
"""

from __future__ import annotations

from torch import Tensor


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """[T] -> [T]: G_t."""
    total = rewards.clone()
    terms, factor = 1, gamma
    while terms < len(total) and factor != 0:
        total[:-terms] += factor * total[terms:]
        terms, factor = 2 * terms, factor * factor
    return total
