"""The clipped surrogate objective, per token.

PPO (Schulman et al. 2017, eq. 7) with separate lower and upper bounds (DAPO, Yu et al. 2025, "clip-higher") and the
dual clip for negative advantages (Ye et al. 2020):
    ratio = exp(log pi - log pi_old)
    L = max(-ratio A, -clip(ratio, 1 - eps_low, 1 + eps_high) A)
    where A < 0 and a dual clip c > 1 is set: L = min(L, -c A)
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.ratio import finite_ratio


def clipped_policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Per-token loss, and per-token 1.0 where the clipped branch was the one taken.

    `log_ratio` is that of each token, or that of its sequence (`gspo.sequence_log_ratio`).
    """
    ratio = finite_ratio(log_ratio)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    was_clipped = (clipped > unclipped).to(loss.dtype)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, was_clipped
