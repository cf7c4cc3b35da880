"""Converts a micro-batch to the dict that custom losses get.

Invariant: samples are in the order of the packed row; per-token values are a list with one tensor per sample; every key
that losses may use is present, with None if the run does not have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime.storage.json_types import JsonMapping, JsonObject
from slime.train.samples.micro_batch import MicroBatch
from slime.train.samples.rollout_data import RolloutData

KEYS = (
    "log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "returns",
    "rollout_log_probs",
    "teacher_log_probs",
    "rollout_mask_sums",
    "multimodal_train_inputs",
)
"""Keys that losses may use and that not every run has."""


@dataclass(frozen=True)
class PackedSeqParams:
    """Bounds of the sequences of a packed row, with the field names of Megatron's class."""

    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    qkv_format: str = "thd"
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None

    @classmethod
    def of(cls, cu_seqlens: Tensor, max_length: int) -> PackedSeqParams:
        return cls(cu_seqlens, cu_seqlens, max_length, max_length)


def batch_for_plugins(data: RolloutData, micro: MicroBatch) -> JsonObject:
    """Select the samples of a micro-batch from every column of the data, in the order of the row.

    Adds `tokens` [1, T] as the model sees them, with padding, `unconcat_tokens` by sample, `packed_seq_params`, and
    `full_loss_masks` [1, T].
    """
    batch: JsonObject = dict.fromkeys(KEYS)
    count, device = len(data["response_lengths"]), micro.mask.device
    for name, values in data.items():
        if isinstance(values, list) and len(values) == count:
            own = [values[position] for position in micro.positions]
            batch[name] = [value.to(device) if isinstance(value, Tensor) else value for value in own]
        elif isinstance(values, Tensor) and values.shape[:1] == (count,):
            batch[name] = values[micro.positions].to(device)
        else:
            batch[name] = values
    batch["unconcat_tokens"] = batch["tokens"]
    batch["tokens"] = micro.row.tokens
    batch["packed_seq_params"] = PackedSeqParams.of(micro.row.layout.cu_seqlens, micro.row.layout.max_length)
    masks = full_loss_masks(batch)
    batch["full_loss_masks"] = pad(masks, (0, micro.row.num_tokens - masks.shape[1]))
    return batch


def full_loss_masks(batch: JsonMapping) -> Tensor:
    """Return [1, T]: the mask of each response token at the position whose logits predict it, 0 everywhere else."""
    lengths = zip(batch["loss_masks"], batch["total_lengths"], batch["response_lengths"], strict=True)
    return torch.cat([pad(mask, (total - response - 1, 1)) for mask, total, response in lengths])[None]


class DataIterator:
    """Iterates over a rank's data in micro-batches of a fixed size, or of given samples."""

    def __init__(
        self,
        rollout_data: RolloutData,
        micro_batch_size: int | None = None,
        micro_batch_indices: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if (micro_batch_size is None) == (micro_batch_indices is None):
            raise ValueError("a DataIterator takes either micro_batch_size or micro_batch_indices")
        self.rollout_data = rollout_data
        self.micro_batch_size = micro_batch_size
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0

    def get_next(self, keys: Iterable[str]) -> JsonObject:
        """Return these columns of the next micro-batch; None for columns that the data does not have."""
        if self.micro_batch_indices is not None:
            indices = list(self.micro_batch_indices[self.offset])
            self.offset += 1
        else:
            assert self.micro_batch_size is not None
            begin = self.offset
            self.offset += self.micro_batch_size
            indices = list(range(begin, min(self.offset, len(self.rollout_data["tokens"]))))
        columns = {key: self.rollout_data.get(key) for key in keys}
        return {key: None if values is None else [values[i] for i in indices] for key, values in columns.items()}

    def reset(self) -> DataIterator:
        self.offset = 0
        return self


def padded_batch(data_iterator: DataIterator, keys: Sequence[str], pad_multiplier: int) -> JsonObject:
    """Return the next micro-batch as one packed row whose length is a multiple of `pad_multiplier`.

    The padding is a sequence of its own at the end, of token 0 and mask 0.
    """
    batch = data_iterator.get_next(keys)
    sequences: list[Tensor] = batch["tokens"]
    lengths = [len(tokens) for tokens in sequences]
    row = torch.cat(sequences)
    missing = -len(row) % pad_multiplier
    ends = torch.tensor([0, *lengths, *([missing] if missing else [])], dtype=torch.int32, device=row.device)
    batch["unconcat_tokens"] = sequences
    batch["tokens"] = pad(row, (0, missing))[None]
    batch["packed_seq_params"] = PackedSeqParams.of(ends.cumsum(0, dtype=torch.int32), max(*lengths, missing))
    if all(batch.get(name) is not None for name in ("loss_masks", "total_lengths", "response_lengths")):
        batch["full_loss_masks"] = pad(full_loss_masks(batch), (0, missing))
    return batch
