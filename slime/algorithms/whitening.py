"""Advantages of mean 0 and variance 1 over the whole batch.

    A <- (A - mean) / sqrt(var + 1e-8)        over the unmasked tokens of all ranks, var Bessel-corrected
Invariant: the sums add up over any split of the batch into parts, so every rank whitens alike.
"""

from __future__ import annotations

import torch
from torch import Tensor


def whitening_sums(advantages: Tensor, mask: Tensor) -> Tensor:
    """[count, sum, sum of squares] over masked-in tokens, in float64: add these up over ranks, then call `whiten`."""
    kept = torch.where(mask != 0, advantages, torch.zeros_like(advantages)).double()
    return torch.stack([(mask != 0).double().sum(), kept.sum(), (kept * kept).sum()])


def whiten(advantages: Tensor, mask: Tensor, *, count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) where unmasked; masked tokens keep what they have."""
    mean = total / count.clamp_min(1)
    variance = (squares - count * mean.square()).clamp_min(0) / (count - 1).clamp_min(1)
    return torch.where(mask != 0, (advantages - mean) * torch.rsqrt(variance + 1e-8), advantages)
