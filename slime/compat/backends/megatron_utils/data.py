"""Micro-batches of a rank's data, under the import path of slime plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.errors import UserError
from slime.train.samples.rollout_data import DataIterator, PackedSeqParams, padded_batch

__all__ = ["DataIterator", "PackedSeqParams", "get_batch"]


def get_batch(
    data_iterator: DataIterator, keys: Sequence[str], pad_multiplier: int = 128, qkv_format: str = "thd"
) -> dict[str, Any]:
    """Return the next micro-batch as a packed row.

    It has the columns `keys`, `unconcat_tokens`, `packed_seq_params` and, if the keys include masks and lengths,
    `full_loss_masks`.
    """
    if "tokens" not in keys:
        raise UserError("get_batch: a row is made of tokens: name 'tokens' among the keys")
    if qkv_format != "thd":
        raise UserError(f"get_batch: qkv_format {qkv_format!r}: rows are packed here, which is 'thd'")
    return padded_batch(data_iterator, keys, pad_multiplier)
