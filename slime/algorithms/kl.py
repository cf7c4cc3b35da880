"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled token.

With d = log pi - log pi_ref (Schulman 2020, "Approximating KL Divergence"): k1 = d is unbiased with high variance;
k2 = d^2 / 2 is biased with low variance; k3 = exp(-d) - 1 + d is unbiased, never negative, with low variance;
low_var_kl is k3 clamped to [-10, 10].
"""

from __future__ import annotations

import torch

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def approximate_kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    difference = log_probs - ref_log_probs
    match kind:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            return torch.expm1(-difference) + difference
        case "low_var_kl":
            return (torch.expm1(-difference) + difference).clamp(-10.0, 10.0)
    raise ValueError(f"unknown KL estimator {kind!r}: choose one of {', '.join(KL_TYPES)}")
