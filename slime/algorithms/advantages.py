"""Advantages per response token from rewards per sample: GRPO, GAE, REINFORCE++, whitening, distillation.

Invariant: the result has exactly the length of each response; masked tokens keep a value and are dropped by the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Advantages = tuple[list[Tensor], list[Tensor]]
"""(advantages, returns), one tensor for each sample."""


@dataclass(frozen=True)
class EstimatorInputs:
    """Inputs of an estimator; lists have one entry per sample, tensors one number per response token."""

    rewards: Sequence[float]
    masks: Sequence[Tensor]
    kl: Sequence[Tensor] | None = None
    values: Sequence[Tensor] | None = None
    placed: Sequence[Tensor] | None = None
    """Rewards of single turns, at tokens of these turns."""
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0

    def samples(self) -> Iterator[tuple[float, Tensor, Tensor | None, Tensor | None]]:
        """Yield (reward, mask, KL, rewards of turns) of each sample."""
        none = [None] * len(self.rewards)
        kl, placed = (none if one is None else one for one in (self.kl, self.placed))
        return zip(self.rewards, self.masks, kl, placed, strict=True)


def grpo_advantages(given: EstimatorInputs) -> Advantages:
    """Give every token of a response its reward: A_t = r.

    GRPO with outcome supervision (Shao et al. 2024, "DeepSeekMath"), and the methods that share it (Dr. GRPO, DAPO,
    GSPO, CISPO, RLOO).
    """
    advantages = [
        torch.full((len(mask),), reward, dtype=torch.float32)
        for reward, mask in zip(given.rewards, given.masks, strict=True)
    ]
    return advantages, list(advantages)


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Compute the discounted returns G_t = sum_k gamma^k r_{t+k}, [T] -> [T].

    They are summed by doubling: with S_n(t) the sum of the first n terms, S_2n(t) = S_n(t) + gamma^n S_n(t + n). That
    is log2(T) passes over the whole tensor instead of T dependent steps. Each addition has sums of equally many terms,
    so rounding errors stay small.
    """
    total = rewards.clone()
    terms, factor = 1, gamma
    while terms < len(total) and factor != 0:
        total[:-terms] += factor * total[terms:]
        terms, factor = 2 * terms, factor * factor
    return total


def token_rewards(
    reward: float,
    kl: Tensor | None,
    mask: Tensor,
    *,
    kl_coef: float,
    dtype: torch.dtype,
    placed: Tensor | None = None,
) -> Tensor:
    """Compute the reward of each token, [T], for the estimators that charge the KL in the reward.

        r_t = -beta kl_t m_t + [t is the last unmasked token] R
    A masked token is not an action and is not charged. If all tokens are masked, R is at the last token. Without `kl`
    nothing is charged. Rewards of single turns, at tokens of their own, are added from `placed` [T].
    """
    rewards = torch.zeros(len(mask), dtype=dtype, device=mask.device)
    if kl is not None and kl_coef != 0:
        rewards = torch.where(mask != 0, -kl_coef * kl.to(dtype), rewards)
    places = mask.nonzero()
    rewards[places[-1] if len(places) else slice(-1, None)] += reward
    return rewards if placed is None else rewards + placed.to(rewards)


def reward_dtype(kl: Tensor | None, mask: Tensor) -> torch.dtype:
    """Return the dtype of the KL, else of the mask if that is floating, else float32."""
    source = mask if kl is None else kl
    return source.dtype if source.is_floating_point() else torch.float32


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of one sequence by generalised advantage estimation, all [T].

    GAE (Schulman et al. 2016, eq. 16), over the unmasked tokens of a sequence in order, with V = 0 after the last:
        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = sum_k (gamma lambda)^k delta_{t+k};    G_t = A_t + V_t
    A masked token (such as a tool's answer) is not an action: it is skipped, costs no discount, and has A = 0, G = V.
    """
    is_action = mask != 0
    own = values[is_action]
    following = own.roll(-1)
    following[-1:] = 0.0
    advantages = torch.zeros_like(values)
    advantages[is_action] = discounted_returns(rewards[is_action] + gamma * following - own, gamma * lambd)
    return advantages, advantages + values


def gae_of_rows(rewards_BT: Tensor, values_BT: Tensor, *, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [B, T] of rows of equal length in which every token is an action."""
    following = torch.cat([values_BT[:, 1:], torch.zeros_like(values_BT[:, :1])], dim=1)
    delta = rewards_BT + gamma * following - values_BT
    advantages = discounted_returns(delta.t(), gamma * lambd).t()
    return advantages, advantages + values_BT


def ppo_advantages(given: EstimatorInputs) -> Advantages:
    """Compute GAE of each sample, with its reward at the last unmasked token and the KL charged at every unmasked one.

    Rewards of single turns are added.
    """
    assert given.values is not None, "an estimator with a critic has its values"
    advantages, returns = [], []
    for value, (reward, mask, kl, placed) in zip(given.values, given.samples(), strict=True):
        by_token = token_rewards(reward, kl, mask, kl_coef=given.kl_coef, dtype=value.dtype, placed=placed)
        advantage, target = gae(by_token, value, mask, gamma=given.gamma, lambd=given.lambd)
        advantages.append(advantage)
        returns.append(target)
    return advantages, returns


def reinforce_plus_plus_advantages(given: EstimatorInputs) -> Advantages:
    """Compute the returns of each sample's token rewards; a sample whose tokens are all masked gets zeros.

    REINFORCE++ (Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
    Normalization"), before whitening, which replaces a critic's baseline:
        A_t = G_t = sum_k gamma^k r_{t+k},  r_t = -beta kl_t m_t + [t last unmasked] R
    Rewards of single turns are added.
    """
    advantages = []
    for reward, mask, kl, placed in given.samples():
        earned, dtype = reward if mask.any() else 0.0, reward_dtype(kl, mask)
        by_token = token_rewards(earned, kl, mask, kl_coef=given.kl_coef, dtype=dtype, placed=placed)
        advantages.append(discounted_returns(by_token, given.gamma))
    return advantages, list(advantages)


def reinforce_plus_plus_baseline_advantages(given: EstimatorInputs) -> Advantages:
    """Give every token the reward of its sample, less the KL of each unmasked token.

    REINFORCE++ with baseline, before whitening:
        A_t = r - beta kl_t m_t,  r the reward less its group's mean
    """
    advantages = []
    for reward, mask, kl, _ in given.samples():
        advantage = torch.full((len(mask),), reward, dtype=reward_dtype(kl, mask), device=mask.device)
        if kl is not None and given.kl_coef != 0:
            advantage = torch.where(mask != 0, advantage - given.kl_coef * kl, advantage)
        advantages.append(advantage)
    return advantages, list(advantages)


def whitening_sums(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return [count, sum, sum of squares] over unmasked tokens in float64: add them up over ranks, then call `whiten`.

    Invariant: the sums add up over any split of the batch, so every rank whitens alike.
    """
    kept = torch.where(mask != 0, advantages, torch.zeros_like(advantages)).double()
    return torch.stack([(mask != 0).double().sum(), kept.sum(), (kept * kept).sum()])


def whiten(advantages: Tensor, mask: Tensor, *, count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """Whiten the advantages to mean 0 and variance 1 over the whole batch; masked tokens keep their values.

    A <- (A - mean) / sqrt(var + 1e-8)        over the unmasked tokens of all ranks, var Bessel-corrected
    """
    mean = total / count.clamp_min(1)
    variance = (squares - count * mean.square()).clamp_min(0) / (count - 1).clamp_min(1)
    return torch.where(mask != 0, (advantages - mean) * torch.rsqrt(variance + 1e-8), advantages)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute log pi_student - log pi_teacher of the sampled tokens, [T], without gradient."""
    return (student - teacher).detach()


def subtract_reverse_kl(
    advantages: Sequence[Tensor], student: Sequence[Tensor], teacher: Sequence[Tensor], coef: float
) -> list[Tensor]:
    """Subtract from each sample's advantages the weighted reverse KL of its tokens.

    On-policy distillation (Thinking Machines Lab 2025; the on-policy, reverse-KL case of GKD, Agarwal et al. 2024):
        A_t <- A_t - coef (log pi_student(y_t) - log pi_teacher(y_t))
    Over the student's samples the bracket has the reverse KL as its mean. It is a constant of the loss: no gradient.
    """
    return [
        advantage - coef * reverse_kl(own, other)
        for advantage, own, other in zip(advantages, student, teacher, strict=True)
    ]
