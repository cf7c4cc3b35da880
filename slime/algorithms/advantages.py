"""From one reward per sample to one advantage per response token.

Invariant: the result has exactly the length of each response; masked tokens keep a value and are dropped by the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def grpo_advantages(rewards: Sequence[float], response_lengths: Sequence[int]) -> list[torch.Tensor]:
    """A_t = r for every token of the response (Shao et al. 2024, "DeepSeekMath", outcome supervision)."""
    return [
        torch.full((length,), reward, dtype=torch.float32)
        for reward, length in zip(rewards, response_lengths, strict=True)
    ]


def whiten(
    advantages: torch.Tensor, mask: torch.Tensor, *, count: torch.Tensor, total: torch.Tensor, squares: torch.Tensor
) -> torch.Tensor:
    """(A - mean) / sqrt(var + 1e-8) from the sums over all masked-in tokens of all ranks (Bessel-corrected)."""
    mean = total / count.clamp_min(1)
    variance = (squares - count * mean.square()).clamp_min(0) / (count - 1).clamp_min(1)
    return torch.where(mask.bool(), (advantages - mean) * torch.rsqrt(variance + 1e-8), advantages)


def whitening_sums(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[count, sum, sum of squares] over masked-in tokens, in float64: add these up over ranks, then call `whiten`."""
    kept = advantages.double() * mask.double()
    return torch.stack([mask.double().sum(), kept.sum(), (kept * kept).sum()])
