"""Importance weights and rejection masks for the difference between the sampling engine and the trainer.

With d_t = log pi_train - log pi_rollout of the sampled token, the ratio is exp(clamp(l, -20, 20)), where l is
    token        d_t
    sequence     the sum of d over the unmasked tokens of the sequence
    geometric    the mean of d over them
and the weight is
    truncate     min(ratio, upper)                      (TIS; Yao et al. 2025, "Your Efficient RL Framework ...")
    clip         min(max(ratio, lower), upper)
    mask         ratio within [lower, upper], else 0    (IcePop; Ling Team 2025, "Every Step Evolves")
Sequence-level weights: Liu et al. 2025, "When Speed Kills Stability". Weights are constants: no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.reduce import masked_means, segment_sums, spread

LOG_RATIO_BOUND = 20.0
LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights; all tensors are [R], one entry for each response token."""

    weights: Tensor
    ratio: Tensor  # before the bounds
    out_of_bounds: Tensor  # 1.0 where the bounds changed the weight


@torch.no_grad()
def level_log_ratio(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, lengths: Sequence[int], level: str
) -> Tensor:
    """Compute the log-ratio [R] that applies to each token; at token level that of a masked token is 0."""
    difference = train_log_probs - rollout_log_probs
    kept = torch.where(mask != 0, difference, torch.zeros_like(difference))
    match level:
        case "token":
            return kept
        case "sequence":
            return spread(segment_sums(kept, lengths), lengths)
        case "geometric":
            return spread(masked_means(kept, mask, lengths), lengths)
    raise ValueError(f"unknown level {level!r}: choose one of {', '.join(LEVELS)}")


@torch.no_grad()
def importance_weights(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    level: str,
    mode: str,
    lower: float,
    upper: float,
) -> ImportanceWeights:
    """Compute the factor of each token's loss; `truncate` ignores `lower`."""
    log_ratio = level_log_ratio(train_log_probs, rollout_log_probs, mask, lengths, level)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    too_large, too_small = ratio > upper, ratio < lower
    match mode:
        case "truncate":
            weights, outside = ratio.clamp_max(upper), too_large
        case "clip":
            weights, outside = ratio.clamp(lower, upper), too_large | too_small
        case "mask":
            outside = too_large | too_small
            weights = ratio.masked_fill(outside, 0.0)
        case _:
            raise ValueError(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
    return ImportanceWeights(weights, ratio, outside.to(ratio.dtype))


@torch.no_grad()
def weight_sums(weights: Tensor, mask: Tensor, lengths: Sequence[int], level: str) -> Tensor:
    """Return [sum of weights, count] in float64, to be added up over a step for `unit_mean_scale`.

    The sum is over unmasked tokens; at sequence level it is over the sequences with unmasked tokens, each counted once.
    """
    kept = mask != 0
    if level != "token":
        weights, kept = masked_means(weights, mask, lengths), segment_sums(kept.float(), lengths) > 0
    total = torch.where(kept, weights, torch.zeros_like(weights)).double().sum()
    return torch.stack([total, kept.sum().double()])


def unit_mean_scale(total: float, count: float) -> float:
    """Return the factor that gives the weights a mean of 1; it is 1 if all weights are 0."""
    return count / total if total > 0 else 1.0


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
    """Remove tokens and sequences from the mask on which trainer and engine differ too much; return [R], 0 or 1.

    With the ratio r of `level_log_ratio` (token, sequence or geometric mean; not clamped here):
        kept      lower <= r <= upper
        veto      one unmasked token with pi_train / pi_rollout < threshold rejects its whole sequence
    Rejection sampling and veto: Liu et al. 2025, "When Speed Kills Stability".
    """
    ratio = level_log_ratio(train_log_probs, rollout_log_probs, mask, lengths, level).exp()
    kept = (mask != 0) & (ratio >= lower) & (ratio <= upper)
    if veto_threshold is not None:
        token = level_log_ratio(train_log_probs, rollout_log_probs, mask, lengths, "token")
        vetoes = ((mask != 0) & (token < math.log(veto_threshold))).to(token.dtype)
        kept &= spread(segment_sums(vetoes, lengths), lengths) == 0
    return kept.to(ratio.dtype)
