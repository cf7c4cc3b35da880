"""Sequences that were bad and have become unlikely since are left alone.

Off-policy sequence masking (DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1): token t of sequence i has weight
    0   where A_t < 0 and mean over the unmasked tokens of i of (log pi_old - log pi) > delta
    1   otherwise
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.segments import masked_means, spread


@torch.no_grad()
def off_policy_sequence_mask(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, lengths: Sequence[int], *, delta: float
) -> Tensor:
    """[R]: the weight of each token, 0 or 1, without gradient."""
    drift = spread(masked_means(old_log_probs - log_probs, mask, lengths), lengths)
    return 1.0 - ((advantages < 0) & (drift > delta)).to(log_probs.dtype)
