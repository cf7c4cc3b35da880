"""Formulas of the losses and estimators, under the import path of slime plugins.

Tensors of one sample are [response length], lists have one entry per sample. Process groups of tensor parallelism are
accepted and must have one member: logits are not sharded across ranks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.advantages import (
    EstimatorInputs,
    gae_of_rows,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from slime.algorithms.logprobs import log_probs_of_logits
from slime.algorithms.policy_loss import approximate_kl, cispo_loss, clipped_policy_loss, off_policy_sequence_mask
from slime.algorithms.reduce import masked_means, segment_sums, spread
from slime.errors import UserError

Tensors = Sequence[Tensor]
Rewards = Sequence[float] | Tensor


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Compute KL(policy || base) by token: k1, k2, k3 or low_var_kl; times pi / pi_old if given."""
    return approximate_kl(log_probs.float(), log_probs_base.float(), kl_loss_type, ratio=importance_ratio)


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return (clipped surrogate loss, 1.0 where it was clipped) by token; `ppo_kl` is log pi_old - log pi."""
    if eps_clip_c is not None and eps_clip_c <= 1.0:
        raise UserError(f"compute_policy_loss: eps_clip_c is {eps_clip_c}: a dual clip is above 1")
    return clipped_policy_loss(
        -ppo_kl, advantages, eps_clip=eps_clip, eps_clip_high=eps_clip_high, eps_clip_c=eps_clip_c
    )


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return (-sg(clipped ratio) A log pi, 1.0 where the ratio was out of bounds) by token."""
    return cispo_loss(log_probs, -ppo_kl, advantages, eps_clip=eps_clip, eps_clip_high=eps_clip_high)


def compute_gspo_kl(
    full_log_probs: Tensors, full_old_log_probs: Tensors, local_log_probs: Tensors, loss_masks: Tensors
) -> Tensor:
    """Return the masked mean of log pi_old - log pi over each whole sequence, at every token of its local part."""
    difference = torch.cat(list(full_old_log_probs)) - torch.cat(list(full_log_probs))
    means = masked_means(difference, torch.cat(list(loss_masks)), [len(part) for part in full_log_probs])
    return spread(means, [len(part) for part in local_log_probs])


def compute_opsm_mask(
    args: Any, full_log_probs: Tensors, full_old_log_probs: Tensors, advantages: Tensors, loss_masks: Tensors
) -> tuple[Tensor, Tensor]:
    """Return (0 for tokens dropped by off-policy sequence masking, the sum over samples of the dropped fraction)."""
    lengths = [len(part) for part in full_log_probs]
    mask = torch.cat(list(loss_masks))
    keep = off_policy_sequence_mask(
        torch.cat(list(full_log_probs)),
        torch.cat(list(full_old_log_probs)),
        torch.cat(list(advantages)),
        mask,
        lengths,
        delta=args.opsm_delta,
    )
    counts = segment_sums((mask != 0).to(keep.dtype), lengths).clamp_min(1)
    return keep, (segment_sums(1.0 - keep, lengths) / counts).sum()


def compute_log_probs(logits: Tensor, tokens: Tensor, process_group: Any) -> Tensor:
    """Return [R, 1]: the log-prob of each token under its row of logits [R, V]."""
    _one_member(process_group)
    return log_probs_of_logits(logits, tokens)[0][:, None]


def compute_entropy_from_logits(logits: Tensor, process_group: Any) -> Tensor:
    """Return [R]: the entropy of each row of logits [R, V]."""
    _one_member(process_group)
    _, entropy = log_probs_of_logits(logits, logits.new_zeros(len(logits), dtype=torch.long), with_entropy=True)
    assert entropy is not None
    return entropy


def calculate_log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1
) -> tuple[Tensor, Tensor | None]:
    """Return (log-probs [R, 1], entropies [R] or None) of `tokens` under their rows of logits [R, V]."""
    _one_member(tp_group)
    log_probs, entropy = log_probs_of_logits(logits, tokens, chunk_rows=chunk_size, with_entropy=with_entropy)
    return log_probs[:, None], entropy


def get_grpo_returns(rewards: Rewards, kl: Tensors) -> list[Tensor]:
    """Return the reward of each sample at each of its tokens."""
    returns, _ = grpo_advantages(EstimatorInputs([float(reward) for reward in rewards], kl))
    return [found.to(part) for found, part in zip(returns, kl, strict=True)]


def get_reinforce_plus_plus_returns(
    rewards: Rewards,
    kl: Tensors,
    loss_masks: Tensors,
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """Return the discounted returns of -kl_coef kl_t and the reward at the last unmasked token."""
    rewards = [float(reward) for reward in rewards]
    return reinforce_plus_plus_advantages(EstimatorInputs(rewards, loss_masks, kl, kl_coef=kl_coef, gamma=gamma))[0]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Rewards, kl: Tensors, loss_masks: Tensors, kl_coef: float
) -> list[Tensor]:
    """Return the reward of each sample minus kl_coef kl_t, before whitening."""
    rewards = [float(reward) for reward in rewards]
    return reinforce_plus_plus_baseline_advantages(EstimatorInputs(rewards, loss_masks, kl, kl_coef=kl_coef))[0]


def get_advantages_and_returns(
    total_len: int, response_len: int, values: Tensor, rewards: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Compute GAE of one sample from the rewards and values [R] of its tokens, without gradient."""
    advantages, returns = get_advantages_and_returns_batch(
        [total_len], [response_len], [values], [rewards], gamma, lambd
    )
    return advantages[0], returns[0]


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Tensors,
    rewards_list: Tensors,
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute GAE of each sample; `chunked` is ignored, since both of upstream's variants give the same numbers."""
    found = [
        gae_of_rows(rewards.detach()[None], values.detach()[None], gamma=gamma, lambd=lambd)
        for values, rewards in zip(values_list, rewards_list, strict=True)
    ]
    return [advantages[0] for advantages, _ in found], [returns[0] for _, returns in found]


def vanilla_gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [B, T]."""
    return gae_of_rows(rewards, values, gamma=gamma, lambd=lambd)


def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [B, T] in one scan; `chunk_size` has no effect."""
    return gae_of_rows(rewards, values, gamma=gamma, lambd=lambd)


def _one_member(group: Any) -> None:
    if group is not None and group.size() > 1:
        raise UserError(
            f"log-probs over a tensor-parallel group of {group.size()} ranks are not in this version: here every rank "
            "has all logits; pass None for the group"
        )
