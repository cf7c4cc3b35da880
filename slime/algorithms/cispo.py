"""A clipped weight on the policy gradient instead of a clipped loss.

CISPO (MiniMax 2025, "MiniMax-M1"), with sg the stop-gradient:
    L = -sg(clip(ratio, 1 - eps_low, 1 + eps_high)) A log pi
No token loses its gradient; the paper clips from above only, which is eps_low >= 1.
"""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.ratio import finite_ratio


def cispo_loss(
    log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Per-token loss, and per-token 1.0 where the ratio was out of bounds."""
    ratio = finite_ratio(log_ratio.detach())
    weight = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    return -weight * advantages * log_probs, (weight != ratio).to(log_probs.dtype)
