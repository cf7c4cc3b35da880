"""One reward a token, for the estimators that charge the KL in the reward.

    r_t = -beta kl_t m_t + [t is the last unmasked token] R
A masked token is no action: it is charged nothing. If all are masked, R is at the last token. Turns that were rewarded
one by one have their rewards at tokens of their own (`placed`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(
    reward: float,
    kl: Tensor | None,
    mask: Tensor,
    *,
    kl_coef: float,
    dtype: torch.dtype,
    placed: Tensor | None = None,
) -> Tensor:
    """[T]: without a `kl`, only the reward at its place; and what is `placed` [T] already."""
    rewards = torch.zeros(len(mask), dtype=dtype, device=mask.device)
    if kl is not None and kl_coef != 0:
        rewards = torch.where(mask != 0, -kl_coef * kl.to(dtype), rewards)
    places = mask.nonzero()
    rewards[places[-1] if len(places) else slice(-1, None)] += reward
    return rewards if placed is None else rewards + placed.to(rewards)


def reward_dtype(kl: Tensor | None, mask: Tensor) -> torch.dtype:
    """The precision of the log-probs, else of the mask if that is floating, else float32."""
    source = mask if kl is None else kl
    return source.dtype if source.is_floating_point() else torch.float32
