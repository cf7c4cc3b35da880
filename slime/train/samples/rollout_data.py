"""Columns of one rank's samples under the names that plugins use, and the dicts that custom losses get.

Invariant: every list has one entry per sample of the rank, in the rank's order; per-token entries are float32 tensors
on the host, one number for each response token. Hooks may change the lists in place and add their own. In the dict of a
micro-batch samples are in the order of the packed row, and every key that losses may use is present, with None if the
run does not have it. Training never updates weights from non-finite values, and the samples that caused them are on
disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from slime.data.validation import keep_bad_sample
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject
from slime.train.samples.batch import TrainBatch
from slime.train.samples.micro_batch import MicroBatch
from slime.train.topology import Ranks

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


DUMPED = ("sample_indices", "group_indices", "rollout_ids", "rewards", "raw_reward", "truncated")
"""Columns of a dump with a value per sample."""


def dump_rows(data: RolloutData, *, rank: int) -> list[JsonObject]:
    """Return one plain dict per sample of a rank, with the values that the losses used for the whole response."""
    rows = []
    for position in range(len(data["response_lengths"])):
        row: JsonObject = {"data_parallel_rank": rank}
        row |= {name: data[name][position] for name in DUMPED}
        for name in ("tokens", "loss_masks", *PER_TOKEN):
            if name in data:
                row[name] = data[name][position].tolist()
        rows.append(row)
    return rows


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


MAX_REPORTED_SAMPLES = 4
"""Maximum number of samples that one rank reports."""


def check_columns_finite(data: RolloutData, ranks: Ranks, *, rollout_id: int, run_dir: str) -> list[str]:
    """Return a sentence for each sample of any rank with a non-finite number at an unmasked token."""
    own: list[str] = []
    for name in PER_TOKEN:
        if name in data and not own:
            column = list(enumerate(data[name]))
            own = report_samples(data, column, f"{name} that are not finite", rollout_id=rollout_id, run_dir=run_dir)
    return collect_sentences(own, ranks)


def collect_sentences(sentences: Sequence[str], ranks: Ranks) -> list[str]:
    """Collect the sentences of all ranks, equal on each rank; duplicates of ranks that share samples are dropped."""
    anywhere = bool(ranks.max(torch.tensor([float(bool(sentences))], device=ranks.device)).item())
    return sorted(ranks.union(sentences)) if anywhere else []


def report_samples(
    data: RolloutData, found: Sequence[tuple[int, Tensor]], what: str, *, rollout_id: int, run_dir: str
) -> list[str]:
    """Save the samples with a non-finite number at an unmasked token; return a sentence for each.

    `found` has (position, numbers). If all are finite, the common case, they are checked in one call.
    """
    if not found or bool(torch.isfinite(torch.cat([values.reshape(-1) for _, values in found])).all()):
        return []
    unmasked = [(position, values[data["loss_masks"][position] != 0]) for position, values in found]
    bad = [position for position, values in unmasked if not bool(torch.isfinite(values).all())]
    sentences = []
    for position in bad[:MAX_REPORTED_SAMPLES]:
        index, count = data["sample_indices"][position], len(data["response_lengths"])
        facts = {"rollout_id": rollout_id, "what": what}
        for name, values in data.items():
            if isinstance(values, list | Tensor) and len(values) == count:
                value = values[position]
                facts[name] = value.tolist() if isinstance(value, Tensor) else value
        path = keep_bad_sample(run_dir, rollout_id, index, facts)
        sentences.append(f"sample {index} has {what} (see {path})")
    return [*sentences, f"and {len(bad) - MAX_REPORTED_SAMPLES} more"] if len(bad) > MAX_REPORTED_SAMPLES else sentences


def report_nonfinite(
    data: RolloutData, found: Sequence[tuple[int, Tensor]], what: str, ranks: Ranks, rollout_id: int, run_dir: str
) -> list[str]:
    """Report the samples that made a step non-finite, from the model's current numbers `found` (position, numbers).

    The result is equal on all ranks. Without such a sample, the sample with the largest advantage is reported.
    """
    own = report_samples(data, found, f"{what} that are not finite", rollout_id=rollout_id, run_dir=run_dir)
    if sentences := collect_sentences(own, ranks):
        return sentences
    largest = [-1.0, -1.0]
    for position, _ in found if "advantages" in data else ():
        values = data["advantages"][position][data["loss_masks"][position] != 0].abs()
        if len(values) and float(values.max()) > largest[0]:
            largest = [float(values.max()), float(data["sample_indices"][position])]
    size, index = max(part.tolist() for part in ranks.gather(torch.tensor(largest, dtype=torch.float64)))
    if size >= 0:
        return [f"no sample has non-finite numbers; sample {index:.0f} has the largest advantage, {size:.3g}"]
    return []
