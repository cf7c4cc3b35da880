"""Tokens and sequences that trainer and engine disagree on too much are not trained on.

With the ratio r of `importance.level_log_ratio` (token, sequence or geometric mean; not clamped here):
    kept      lower <= r <= upper
    veto      one unmasked token with pi_train / pi_rollout < threshold rejects its whole sequence
Rejection sampling and veto: Liu et al. 2025, "When Speed Kills Stability".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.importance import level_log_ratio
from slime.algorithms.segments import segment_sums, spread


@torch.no_grad()
def rejection_mask(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    level: str,
    lower: float,
    upper: float,
    veto_threshold: float | None = None,
) -> Tensor:
    """[R]: what is left of the mask, 0 or 1."""
    ratio = level_log_ratio(train_log_probs, rollout_log_probs, mask, lengths, level).exp()
    kept = (mask != 0) & (ratio >= lower) & (ratio <= upper)
    if veto_threshold is not None:
        token = level_log_ratio(train_log_probs, rollout_log_probs, mask, lengths, "token")
        vetoes = ((mask != 0) & (token < math.log(veto_threshold))).to(token.dtype)
        kept &= spread(segment_sums(vetoes, lengths), lengths) == 0
    return kept.to(ratio.dtype)
