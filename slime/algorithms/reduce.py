"""Reductions of per-token values to the loss, and sums, means and broadcasts over the sequences of a packed row.

Invariant: all reductions are sums over tokens of `value * weight`, so any split of the tokens into micro-batches and
ranks adds up to the same total.

Per-rollout mean: weight = mask / rollout_mask_sum / number of rollouts in the step. Every rollout counts once,
independently of its length and of the number of samples it was fanned out into (`rollout_mask_sum` counts the unmasked
tokens of all its samples). Per-token mean: weight = mask / unmasked tokens in the step (DAPO, Yu et al. 2025,
token-level loss). Constant: weight = mask / length / number of rollouts, with one length for all (Dr. GRPO, Liu et al.
2025).

Invariant of the functions over sequences: the result of a sequence depends on its own tokens only, so cutting a row
between sequences changes no bit of it. Tokens are packed without gaps, and `lengths` has the number of tokens of each
sequence; gradients flow, in a fixed order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def per_rollout_weights(mask: Tensor, rollout_mask_sums: Tensor, num_rollouts: int) -> Tensor:
    """Return the weights of the per-rollout mean; `rollout_mask_sums` has the count of its rollout at every token."""
    floating = _as_floating(mask)
    return floating / rollout_mask_sums.to(floating.dtype).clamp_min(1.0) / max(num_rollouts, 1)


def per_token_weights(mask: Tensor, num_tokens: int) -> Tensor:
    """Return the weights of the per-token mean."""
    return _as_floating(mask) / max(num_tokens, 1)


def constant_weights(mask: Tensor, length: int, num_rollouts: int) -> Tensor:
    """Return the weights that divide by a constant length."""
    return _as_floating(mask) / max(length, 1) / max(num_rollouts, 1)


def sample_mean_weights(masks: Sequence[Tensor], mask_sums: Sequence[Tensor] | Tensor | None = None) -> Tensor:
    """Return the weights [R] whose weighted sum is the sum over samples of their masked means.

    `mask_sums` are the denominators if they are not the samples' own counts but those of whole rollouts.
    """
    counts = [mask.sum() for mask in masks] if mask_sums is None else list(mask_sums)
    parts = [_as_floating(mask) / count.clamp_min(1) for mask, count in zip(masks, counts, strict=True)]
    return torch.cat(parts)


def reducer_weights(reducer: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Compute the weights [R] of a reducer that is a weighted sum: they are its gradient."""
    with torch.enable_grad():
        probe = torch.zeros_like(like, requires_grad=True)
        (weights,) = torch.autograd.grad(reducer(probe), probe)
    return weights


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum value * weight; a value with weight zero does not affect the sum, even if it is inf or nan."""
    return torch.where(weights != 0, values * weights, torch.zeros_like(values)).sum()


def _as_floating(mask: Tensor) -> Tensor:
    return mask if mask.is_floating_point() else mask.float()


def segment_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over each sequence, [R] -> [n]."""
    if not lengths:
        return values.new_zeros(0)
    return torch.stack([part.sum() for part in values.split(list(lengths))])


def masked_means(values: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute sum(v m) / max(sum m, 1) over each sequence, [R] -> [n]; masked values may be nan."""
    kept = torch.where(mask != 0, values, torch.zeros_like(values))
    counts = segment_sums((mask != 0).to(values.dtype), lengths)
    return segment_sums(kept, lengths) / counts.clamp_min(1)


def spread(per_sequence: Tensor, lengths: Sequence[int]) -> Tensor:
    """Broadcast the value of each sequence to its tokens, [n] -> [R]."""
    if not lengths:
        return per_sequence.new_zeros(0)
    parts = zip(per_sequence.unbind(), lengths, strict=True)
    return torch.cat([value.expand(length) for value, length in parts])
