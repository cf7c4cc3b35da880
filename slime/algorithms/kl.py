"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled token.

With d = log pi - log pi_ref (Schulman 2020, "Approximating KL Divergence"): k1 = d is unbiased with high variance;
k2 = d^2 / 2 is biased with low variance; k3 = exp(-d) - 1 + d is unbiased, never negative, with low variance;
low_var_kl is k3, weighed if it is, and then clamped to [-10, 10].

The gradient of such an estimate is not an estimate of the KL's gradient unless the sample is weighed by the ratio of
the policy it is meant for to the policy it came from (DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1), token by token
whatever the surrogate's ratio is:
    unbiased = pi / pi_old * kl
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.ratio import MAX_LOG_RATIO

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def approximate_kl(log_probs: Tensor, ref_log_probs: Tensor, kind: str, *, ratio: Tensor | None = None) -> Tensor:
    """Per token; with `ratio` = pi / pi_old (finite) weighed by it, and the gradient flows through both factors."""
    difference = log_probs - ref_log_probs
    match kind:
        case "k1":
            kl = difference
        case "k2":
            kl = 0.5 * difference.square()
        case "k3" | "low_var_kl":
            kl = _k3(difference)
        case _:
            raise ValueError(f"unknown KL estimator {kind!r}: choose one of {', '.join(KL_TYPES)}")
    if ratio is not None:
        kl = kl * ratio
    return kl.clamp(-10.0, 10.0) if kind == "low_var_kl" else kl


def _k3(difference: Tensor) -> Tensor:
    return torch.expm1((-difference).clamp_max(MAX_LOG_RATIO)) + difference
