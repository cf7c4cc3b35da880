"""Responses that come close to the length limit lose reward.

DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), with M the limit, B the buffer, p the penalty:
    0                      L <= M - B
    -p (L - (M - B)) / B   M - B < L <= M
    -p                     L > M
A buffer of 0 is no shaping at all.
"""

from __future__ import annotations

from collections.abc import Sequence


def overlong_penalties(
    response_lengths: Sequence[int], *, max_len: int, buffer_len: int, penalty: float
) -> list[float]:
    """What is added to each sample's reward: between -penalty and 0."""
    if buffer_len <= 0:
        return [0.0] * len(response_lengths)
    free = max_len - buffer_len
    return [-penalty * min(max(length - free, 0) / buffer_len, 1.0) for length in response_lengths]
