"""Policy and value losses per token: clipped surrogate (PPO), CISPO, GSPO's ratio, OPSM, clipped value loss, KL.

Invariant: the ratio is finite in float32. An infinite one would turn the zero gradient of a clipped or masked token
into nan (0 * inf); log-ratios above MAX_LOG_RATIO are therefore read as MAX_LOG_RATIO.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.reduce import masked_means, spread

MAX_LOG_RATIO = 80.0
KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def finite_ratio(log_ratio: Tensor) -> Tensor:
    """Compute exp(min(log_ratio, 80)); exp(80) is 5.5e34, and the largest float32 is 3.4e38."""
    return log_ratio.clamp_max(MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the clipped surrogate loss per token; the second result is 1.0 where the clipped branch was used.

    PPO (Schulman et al. 2017, eq. 7) with separate lower and upper bounds (DAPO, Yu et al. 2025, "clip-higher") and the
    dual clip for negative advantages (Ye et al. 2020):
        ratio = exp(log pi - log pi_old)
        L = max(-ratio A, -clip(ratio, 1 - eps_low, 1 + eps_high) A)
        where A < 0 and a dual clip c > 1 is set: L = min(L, -c A)
    `log_ratio` is that of each token, or that of its sequence (`sequence_log_ratio`).
    """
    ratio = finite_ratio(log_ratio)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    was_clipped = (clipped > unclipped).to(loss.dtype)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, was_clipped


def cispo_loss(
    log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Compute the CISPO loss per token; the second result is 1.0 where the ratio was out of bounds.

    CISPO (MiniMax 2025, "MiniMax-M1") clips the weight on the policy gradient instead of the loss, with sg the
    stop-gradient:
        L = -sg(clip(ratio, 1 - eps_low, 1 + eps_high)) A log pi
    No token loses its gradient; the paper clips from above only, which is eps_low >= 1.
    """
    ratio = finite_ratio(log_ratio.detach())
    weight = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    return -weight * advantages * log_probs, (weight != ratio).to(log_probs.dtype)


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute the sequence-level importance ratio of GSPO, [R]: log s_i at every token of sequence i.

    GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", eq. 7): the ratio of every token of sequence i is
        s_i = exp(1 / |y_i| * sum_t (log pi(y_t) - log pi_old(y_t)))        over its unmasked tokens
    and goes through the clipped surrogate as a token's ratio would. The gradient flows through the mean. The result is
    0 for a sequence whose tokens are all masked.
    """
    return spread(masked_means(log_probs - old_log_probs, mask, lengths), lengths)


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
    """Compute the weights of off-policy sequence masking (OPSM), [R]: 0 or 1 for each token, without gradient.

    DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1: token t of sequence i has weight
        0   where A_t < 0 and mean over the unmasked tokens of i of (log pi_roll - log pi) > delta
        1   otherwise
    with pi_roll the probabilities that the engine sampled with: the mean covers both the changes by updates since then
    and the difference between engine and trainer.
    """
    drift = spread(masked_means(rollout_log_probs - log_probs, mask, lengths), lengths)
    return 1.0 - ((advantages < 0) & (drift > delta)).to(log_probs.dtype)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Compute the clipped value loss per token; the second result is 1.0 where the clipped branch was used.

    PPO's value loss (Schulman et al. 2017, as in the authors' code), without a factor 1/2:
        L = max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2)
    """
    near = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    unclipped, clipped = (values - returns).square(), (near - returns).square()
    return torch.maximum(unclipped, clipped), (clipped > unclipped).to(values.dtype)


def approximate_kl(log_probs: Tensor, ref_log_probs: Tensor, kind: str, *, ratio: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) per token from the log-probs of the sampled token.

    With d = log pi - log pi_ref (Schulman 2020, "Approximating KL Divergence"): k1 = d is unbiased with high variance;
    k2 = d^2 / 2 is biased with low variance; k3 = exp(-d) - 1 + d is unbiased, never negative, with low variance;
    low_var_kl is k3, weighted if `ratio` is given, and then clamped to [-10, 10].

    The gradient of such an estimate is not an estimate of the KL's gradient unless the sample is weighted by `ratio`,
    that of the present policy to the policy that sampled it (DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1). The ratio
    is per token for every surrogate, and finite; the gradient flows through both factors:
        unbiased = pi / pi_old * kl
    """
    difference = log_probs - ref_log_probs
    match kind:
        case "k1":
            kl = difference
        case "k2":
            kl = 0.5 * difference.square()
        case "k3" | "low_var_kl":
            kl = torch.expm1((-difference).clamp_max(MAX_LOG_RATIO)) + difference
        case _:
            raise ValueError(f"unknown KL estimator {kind!r}: choose one of {', '.join(KL_TYPES)}")
    if ratio is not None:
        kl = kl * ratio
    return kl.clamp(-10.0, 10.0) if kind == "low_var_kl" else kl
