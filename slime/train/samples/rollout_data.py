"""Columns of one rank's samples, under the names that plugins use.

Invariant: every list has one entry per sample of the rank, in the rank's order; per-token entries are float32 tensors
on the host, one number for each response token. Hooks may change the lists in place and add their own.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from slime.errors import UserError
from slime.storage.json_types import JsonObject
from slime.train.samples.batch import TrainBatch
from slime.train.samples.micro_batch import MicroBatch

RolloutData = JsonObject

PER_TOKEN = (
    "rollout_log_probs",
    "teacher_log_probs",
    "log_probs",
    "entropy",
    "ref_log_probs",
    "values",
    "kl",
    "opd_reverse_kl",
    "advantages",
    "returns",
)
"""Columns with a value per response token that training computes or reads."""


def make_rollout_data(batch: TrainBatch) -> RolloutData:
    """Make the columns of a batch."""
    data: RolloutData = {
        "tokens": [torch.from_numpy(tokens.astype(np.int64)) for tokens in batch.tokens],
        "total_lengths": batch.total_lengths,
        "response_lengths": list(batch.response_lengths),
        "loss_masks": [torch.from_numpy(mask.astype(np.float32)) for mask in batch.loss_masks],
        "rewards": list(batch.rewards),
        "raw_reward": list(batch.raw_reward),
        "truncated": list(batch.truncated),
        "sample_indices": list(batch.sample_indices),
        "group_indices": list(batch.group_indices),
        "rollout_ids": list(batch.rollout_ids),
        "rollout_mask_sums": torch.tensor(batch.rollout_mask_sums, dtype=torch.float32),
        "train_metadata": list(batch.train_metadata),
        **batch.extra,
    }
    if batch.rollout_routed_experts is not None:
        data["rollout_routed_experts"] = [torch.from_numpy(rows) for rows in batch.rollout_routed_experts]
    if batch.version_spans is not None:
        data["version_spans"] = list(batch.version_spans)
    for name in ("rollout_log_probs", "teacher_log_probs", "turn_rewards"):
        column = getattr(batch, name)
        if column is not None:
            data[name] = [torch.from_numpy(values) for values in column]
    return data


def collect(data: RolloutData, name: str, parts: Iterable[tuple[int, Tensor]]) -> None:
    """Set a column from values computed per micro-batch."""
    column: list[Tensor] = [torch.zeros(length) for length in data["response_lengths"]]
    for position, values in parts:
        column[position] = values
    data[name] = column


def distribute(data: RolloutData, micro_batches: Iterable[MicroBatch]) -> None:
    """Copy the per-token columns to the micro-batches."""
    for micro in micro_batches:
        for name in PER_TOKEN:
            if name in data:
                micro.take(name, data[name])


def check_columns(data: RolloutData, names: Iterable[str], path: str) -> None:
    """Check that a hook has set per-token lists of the right shape."""
    lengths = data["response_lengths"]
    for name in names:
        values = data.get(name)
        if (
            not isinstance(values, list)
            or len(values) != len(lengths)
            or not all(isinstance(v, Tensor) and v.shape == (n,) for v, n in zip(values, lengths, strict=True))
        ):
            raise UserError(
                f"{path} must set rollout_data[{name!r}] to a list with one tensor per sample, as long as its response"
            )
