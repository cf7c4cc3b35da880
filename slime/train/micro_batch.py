"""The tensors of one forward and backward.

Invariant: every per-token tensor has one entry for each response token of the packed row, in the row's order, and a
weight of zero wherever the loss mask is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.reduce import per_rollout_weights, per_token_weights
from slime.train.batch import TrainBatch
from slime.train.packing import PackedRow, pack


@dataclass
class MicroBatch:
    """One packed row and, for each of its response tokens, what the loss needs."""

    row: PackedRow
    weights: Tensor  # share of the step's loss; zero where masked
    metric_weights: Tensor  # share of the rollout's per-rollout mean, over all steps
    advantages: Tensor
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    train_log_probs: Tensor | None = None  # of the first training forward, when no separate pass was made


@dataclass(frozen=True)
class StepShare:
    """What the losses of a step are divided by: its rollouts, or its unmasked tokens when `num_tokens` is given."""

    num_rollouts: int
    num_tokens: int | None

    def weights(self, mask: Tensor, rollout_mask_sums: Tensor) -> Tensor:
        if self.num_tokens is not None:
            return per_token_weights(mask, self.num_tokens)
        return per_rollout_weights(mask, rollout_mask_sums, self.num_rollouts)


def make_micro_batch(
    batch: TrainBatch,
    advantages: Sequence[Tensor],
    positions: Sequence[int],
    share: StepShare,
    total_rollouts: int,
    device: torch.device,
) -> MicroBatch:
    """Pack some samples, those of equal length side by side (they share an attention call on the CPU).

    No positions give a one-token row of weight zero, so that the rank joins the collectives.
    """
    has_rollout = batch.rollout_log_probs is not None
    if not positions:
        zero = torch.zeros(1, device=device)
        row = pack([np.zeros(2, dtype=np.int64)], [1], device)
        return MicroBatch(row, zero, zero, zero, rollout_log_probs=zero if has_rollout else None)
    positions = sorted(positions, key=lambda i: len(batch.tokens[i]))
    row = pack([batch.tokens[i] for i in positions], [batch.response_lengths[i] for i in positions], device)
    mask = torch.from_numpy(np.concatenate([batch.loss_masks[i] for i in positions]).astype(np.float32))
    sums = np.repeat([batch.rollout_mask_sums[i] for i in positions], [batch.response_lengths[i] for i in positions])
    mask_sums = torch.from_numpy(sums.astype(np.float32))
    rollout_log_probs = None
    if batch.rollout_log_probs is not None:
        joined = np.concatenate([batch.rollout_log_probs[i] for i in positions])
        rollout_log_probs = torch.from_numpy(joined.astype(np.float32)).to(device)
    return MicroBatch(
        row=row,
        weights=share.weights(mask, mask_sums).to(device),
        metric_weights=per_rollout_weights(mask, mask_sums, total_rollouts).to(device),
        advantages=torch.cat([advantages[i] for i in positions]).to(device),
        rollout_log_probs=rollout_log_probs,
    )
