"""Partitioning of sequences into bins of equal work, under the import path of slime plugins."""

from __future__ import annotations

from collections.abc import Sequence

from slime.errors import UserError
from slime.train.microbatch_plan import partition


def karmarkar_karp(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Partition the indices of `seqlen_list` into bins of similar sums by the largest-differencing method."""
    return partition(seqlen_list, k_partitions, equal_size=equal_size)


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Do the same with at least one index in every bin, and with `equal_size` the same number in each."""
    count = len(seqlen_list)
    if count < k_partitions:
        raise UserError(f"{count} sequences cannot fill {k_partitions} partitions: each must get one")
    if equal_size and count % k_partitions:
        raise UserError(
            f"{count} sequences cannot be parted into {k_partitions} partitions of equal size: give a multiple, or "
            "equal_size=False"
        )
    return partition(seqlen_list, k_partitions, equal_size=equal_size)


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    back = [0] * len(idx_map)
    for place, index in enumerate(idx_map):
        back[index] = place
    return back


def ceildiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
