"""Sums, masked means and broadcasts over the sequences of a packed row.

Invariant: a sequence's result depends on its own tokens only, so cutting a row between sequences changes no bit of it.
Tokens are laid end to end, `lengths` tells how many belong to each sequence; gradients flow, in a fixed order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def segment_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[R] -> [n]: the sum over each sequence."""
    if not lengths:
        return values.new_zeros(0)
    return torch.stack([part.sum() for part in values.split(list(lengths))])


def masked_means(values: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """[R] -> [n]: sum(v m) / max(sum m, 1) over each sequence; masked values may be anything, even nan."""
    kept = torch.where(mask != 0, values, torch.zeros_like(values))
    counts = segment_sums((mask != 0).to(values.dtype), lengths)
    return segment_sums(kept, lengths) / counts.clamp_min(1)


def spread(per_sequence: Tensor, lengths: Sequence[int]) -> Tensor:
    """[n] -> [R]: every token gets the value of its sequence."""
    if not lengths:
        return per_sequence.new_zeros(0)
    parts = zip(per_sequence.unbind(), lengths, strict=True)
    return torch.cat([value.expand(length) for value, length in parts])
