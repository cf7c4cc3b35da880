"""Context parallelism for custom losses; its size is always 1 here, so each rank has whole sequences.

In upstream's layout one rank has both chunks of a sequence that is padded to two of equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from slime.algorithms.reduce import sample_mean_weights, weighted_sum
from slime.errors import UserError

Span = tuple[int, int]
Values = TypeVar("Values", Tensor, list[float])


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int, qkv_format: str = "thd", max_seq_len: int | None = None
) -> tuple[int, tuple[Span, Span], tuple[Span, Span], tuple[Span, Span]]:
    """Return (chunk length, this rank's two chunks, the spans of their response logits, the tokens those predict)."""
    _packed(qkv_format)
    length, first = -(-total_length // 2), total_length - response_length - 1
    chunks = (0, length), (length, 2 * length)
    spans = [(max(begin, first), min(end, total_length - 1)) for begin, end in chunks]
    logits = [span if span[0] < span[1] else (0, 0) for span in spans]  # (0, 0) for a chunk without any
    tokens = [(begin + 1, end + 1) if begin < end else (0, 0) for begin, end in logits]
    return length, chunks, (logits[0], logits[1]), (tokens[0], tokens[1])


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    sample_denoms: Sequence[Tensor] | Tensor | bool | None = None,
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
) -> Callable[[Tensor], Tensor]:
    """Return a reducer of one value per response token: the sum over samples of masked means, or the masked sum.

    `sample_denoms` (a batch's `rollout_mask_sums`) are the denominators if the samples of one rollout share theirs. A
    bool instead of them is `calculate_per_token_loss`, which had this position in upstream's releases before fan-out.
    """
    _packed(qkv_format)
    denoms = None if isinstance(sample_denoms, bool) else sample_denoms
    if isinstance(sample_denoms, bool):
        calculate_per_token_loss = sample_denoms
    if denoms is not None and len(denoms) != len(loss_masks):
        raise UserError(f"get_sum_of_sample_mean: {len(denoms)} sample_denoms for {len(loss_masks)} samples")
    if calculate_per_token_loss:
        weights = torch.cat([mask.float() for mask in loss_masks])
    else:
        weights = sample_mean_weights(loss_masks, denoms)
    return lambda values: weighted_sum(values, weights)


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Return the values of the whole response from this rank's part; with one rank there is nothing to gather."""
    return tensor


def slice_with_cp(
    tokens: Tensor,
    pad_value: float | Callable[[Tensor, int], Tensor],
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
) -> Tensor:
    """Return this rank's part of a whole sequence."""
    _packed(qkv_format)
    return tokens


def slice_log_prob_with_cp(
    log_prob: Values,
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_token_len: int | None = None,
) -> Values:
    """Return this rank's part of one value per response token."""
    _packed(qkv_format)
    if len(log_prob) != response_length:
        raise UserError(f"slice_log_prob_with_cp: {len(log_prob)} values for a response of {response_length} tokens")
    return log_prob


def _packed(qkv_format: str) -> None:
    if qkv_format != "thd":
        raise UserError(f"qkv_format {qkv_format!r}: rows are packed here, which is 'thd'")
