"""From per-token values to the number that is minimised.

Invariant: both reductions are sums over tokens of `value * weight`, so any split of the tokens into micro-batches and
ranks adds up to the same total.

Per-rollout mean: weight = mask / rollout_mask_sum / number of rollouts in the step. Every rollout counts once, whatever
its length and however many samples it was fanned out into (`rollout_mask_sum` counts the unmasked tokens of all its
samples). Per-token mean: weight = mask / unmasked tokens in the step (DAPO, Yu et al. 2025, token-level loss).
"""

from __future__ import annotations

import torch


def per_rollout_weights(mask: torch.Tensor, rollout_mask_sums: torch.Tensor, num_rollouts: int) -> torch.Tensor:
    """`rollout_mask_sums` holds, for every token, the count of its rollout."""
    return mask.float() / rollout_mask_sums.float().clamp_min(1.0) / max(num_rollouts, 1)


def per_token_weights(mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return mask.float() / max(num_tokens, 1)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of value * weight; a value at weight zero cannot poison the sum, not even as inf or nan."""
    return torch.where(weights != 0, values * weights, torch.zeros_like(values)).sum()
