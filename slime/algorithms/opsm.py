"""Off-policy sequence masking (OPSM).

DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1: token t of sequence i has weight
    0   where A_t < 0 and mean over the unmasked tokens of i of (log pi_roll - log pi) > delta
    1   otherwise
with pi_roll the probabilities that the engine sampled with: the mean covers both what updates changed since and the
difference between engine and trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.segments import masked_means, spread


@torch.no_grad()
def off_policy_sequence_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    delta: float,
) -> Tensor:
    """[R]: the weight of each token, 0 or 1, without gradient."""
    drift = spread(masked_means(rollout_log_probs - log_probs, mask, lengths), lengths)
    return 1.0 - ((advantages < 0) & (drift > delta)).to(log_probs.dtype)
