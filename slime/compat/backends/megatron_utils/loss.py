"""The losses and their parts, under the import path of custom losses.

`logits` is the argument of a custom loss: [1, T, V] of a packed row, in float32, before the temperature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.importance import importance_weights
from slime.algorithms.logprobs import log_probs_of_logits
from slime.train.losses.advantages import set_advantages
from slime.train.losses.objectives import Batch, Metrics, Reducer, critic_loss, policy_loss, response_rows, sft_loss
from slime.train.samples.rollout_data import RolloutData
from slime.train.topology import ProcessRanks

Tensors = Sequence[Tensor]


class NonLossOutput(tuple[Tensor, dict[str, list[Tensor]]]):
    """(an empty tensor instead of a loss, lists by name); `output["log_probs"]` also returns a list."""

    def __getitem__(self, key: Any) -> Any:
        _, lists = self
        return lists[key] if isinstance(key, str) else super().__getitem__(key)


def get_responses(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Tensors,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (logits [R, V] at the rollout temperature, tokens [R]) of each response."""
    for rows, tokens in response_rows(logits, unconcat_tokens, total_lengths, response_lengths):
        yield rows / args.rollout_temperature, tokens


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Tensors,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
) -> NonLossOutput:
    """Return `log_probs`, and with `with_entropy` also `entropy`: a tensor [R] for each sample."""
    found = [
        log_probs_of_logits(rows, tokens, chunk_rows=args.log_probs_chunk_size, with_entropy=with_entropy)
        for rows, tokens in get_responses(
            logits,
            args=args,
            unconcat_tokens=unconcat_tokens,
            total_lengths=total_lengths,
            response_lengths=response_lengths,
        )
    ]
    lists = {"log_probs": [log_probs for log_probs, _ in found]}
    if with_entropy:
        lists["entropy"] = [entropy for _, entropy in found if entropy is not None]
    return NonLossOutput((logits.new_empty(0), lists))


def get_values(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Tensors,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
) -> NonLossOutput:
    """Return `values` of a critic's outputs [1, T, 1]: a tensor [R] for each sample, without temperature."""
    rows = response_rows(logits, unconcat_tokens, total_lengths, response_lengths)
    return NonLossOutput((logits.new_empty(0), {"values": [part.squeeze(-1) for part, _ in rows]}))


def compute_advantages_and_returns(args: Any, rollout_data: RolloutData) -> None:
    """Set `advantages` and `returns` with the configured estimator, whitened over all training ranks if configured."""
    set_advantages(args, rollout_data, ProcessRanks())


def policy_loss_function(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """Return (loss, metrics) of `--loss-type policy_loss`."""
    return policy_loss(args, batch, logits, sum_of_sample_mean)


def sft_loss_function(args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> tuple[Tensor, Metrics]:
    """Return (loss, metrics) of `--loss-type sft_loss`."""
    return sft_loss(args, batch, logits, sum_of_sample_mean)


def value_loss_function(args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer) -> tuple[Tensor, Metrics]:
    """Return (loss, metrics) of a critic's outputs [1, T, 1]."""
    return critic_loss(args, batch, logits, sum_of_sample_mean)


def vanilla_tis_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    loss_masks: Tensors,
    **kwargs: Any,
) -> tuple[Tensor, Tensors, Metrics]:
    """Weight each token's loss with its ratio, clipped to `--tis-clip-low` and `--tis-clip`."""
    return _weighed(args, "clip", pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def icepop_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    loss_masks: Tensors,
    **kwargs: Any,
) -> tuple[Tensor, Tensors, Metrics]:
    """Weight each token's loss with its ratio, or with 0 if the ratio is out of bounds."""
    return _weighed(args, "mask", pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def _weighed(
    args: Any, mode: str, pg_loss: Tensor, train: Tensors, rollout: Tensors, masks: Tensors
) -> tuple[Tensor, Tensors, Metrics]:
    found = importance_weights(
        torch.cat(list(train)),
        torch.cat(list(rollout)),
        torch.cat(list(masks)),
        [len(part) for part in train],
        level="token",
        mode=mode,
        lower=args.tis_clip_low,
        upper=args.tis_clip,
    )
    metrics = {"tis": found.ratio, "tis_clipfrac": found.out_of_bounds, "tis_abs": (found.ratio - 1.0).abs()}
    return pg_loss * found.weights, masks, metrics
