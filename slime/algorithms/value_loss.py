"""The clipped regression of a critic, per token.

PPO's value loss (Schulman et al. 2017, as in the authors' code), without a factor 1/2:
    L = max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2)
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Per-token loss, and per-token 1.0 where the clipped branch was the one taken."""
    near = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    unclipped, clipped = (values - returns).square(), (near - returns).square()
    return torch.maximum(unclipped, clipped), (clipped > unclipped).to(values.dtype)
