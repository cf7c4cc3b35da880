"""Generalised advantage estimation over the tokens that are actions.

GAE (Schulman et al. 2016, eq. 16), over the unmasked tokens of a sequence in order, with V = 0 after the last:
    delta_t = r_t + gamma V_{t+1} - V_t
    A_t = sum_k (gamma lambda)^k delta_{t+k};    G_t = A_t + V_t
A masked token (a tool's answer, say) is no action: it is skipped, costs no discount, and has A = 0, G = V.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.returns import discounted_returns
from slime.algorithms.token_rewards import token_rewards


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of one sequence, all [T]."""
    is_action = mask != 0
    own = values[is_action]
    following = own.roll(-1)
    following[-1:] = 0.0
    advantages = torch.zeros_like(values)
    advantages[is_action] = discounted_returns(rewards[is_action] + gamma * following - own, gamma * lambd)
    return advantages, advantages + values


def gae_of_rows(rewards_BT: Tensor, values_BT: Tensor, *, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] of rows of equal length in which every token is an action."""
    following = torch.cat([values_BT[:, 1:], torch.zeros_like(values_BT[:, :1])], dim=1)
    delta = rewards_BT + gamma * following - values_BT
    advantages = discounted_returns(delta.t(), gamma * lambd).t()
    return advantages, advantages + values_BT


def ppo_advantages(
    rewards: Sequence[float],
    values: Sequence[Tensor],
    kl: Sequence[Tensor] | None,
    masks: Sequence[Tensor],
    *,
    kl_coef: float,
    gamma: float,
    lambd: float,
    placed: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """GAE of each sample, its reward at the last unmasked token and the KL charged at every unmasked one.

    Rewards of single turns are `placed` at tokens of theirs.
    """
    advantages, returns = [], []
    penalties = [None] * len(rewards) if kl is None else kl
    own = [None] * len(rewards) if placed is None else placed
    for reward, value, penalty, mask, turns in zip(rewards, values, penalties, masks, own, strict=True):
        by_token = token_rewards(reward, penalty, mask, kl_coef=kl_coef, dtype=value.dtype, placed=turns)
        advantage, target = gae(by_token, value, mask, gamma=gamma, lambd=lambd)
        advantages.append(advantage)
        returns.append(target)
    return advantages, returns
