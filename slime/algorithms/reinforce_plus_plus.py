"""Token returns without a critic; the batch's whitening is the baseline.

REINFORCE++ (Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
Normalization"), before whitening:
    reinforce_plus_plus            A_t = G_t = sum_k gamma^k r_{t+k},  r_t = -beta kl_t m_t + [t last unmasked] R
    reinforce_plus_plus_baseline   A_t = r - beta kl_t m_t,            r the reward less its group's mean
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.returns import discounted_returns
from slime.algorithms.token_rewards import reward_dtype, token_rewards


def reinforce_plus_plus_advantages(
    rewards: Sequence[float],
    kl: Sequence[Tensor] | None,
    masks: Sequence[Tensor],
    *,
    kl_coef: float,
    gamma: float,
    placed: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Returns of each sample's token rewards; a sample that is masked as a whole gets zeros.

    Rewards of single turns are `placed` at tokens of theirs.
    """
    advantages = []
    penalties = [None] * len(rewards) if kl is None else kl
    own = [None] * len(rewards) if placed is None else placed
    for reward, penalty, mask, turns in zip(rewards, penalties, masks, own, strict=True):
        earned, dtype = reward if mask.any() else 0.0, reward_dtype(penalty, mask)
        by_token = token_rewards(earned, penalty, mask, kl_coef=kl_coef, dtype=dtype, placed=turns)
        advantages.append(discounted_returns(by_token, gamma))
    return advantages


def reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float], kl: Sequence[Tensor] | None, masks: Sequence[Tensor], *, kl_coef: float
) -> list[Tensor]:
    """The sample's reward at every token, less the KL of each unmasked one."""
    advantages = []
    penalties = [None] * len(rewards) if kl is None else kl
    for reward, penalty, mask in zip(rewards, penalties, masks, strict=True):
        advantage = torch.full((len(mask),), reward, dtype=reward_dtype(penalty, mask), device=mask.device)
        if penalty is not None and kl_coef != 0:
            advantage = torch.where(mask != 0, advantage - kl_coef * penalty, advantage)
        advantages.append(advantage)
    return advantages
