"""Several sequences as one row, without padding.

Invariant: `row.tokens` is the concatenation of the sequences; `row.predict_index[k]` is the position whose hidden state
predicts `row.targets[k]`, and the k run over the response tokens of all sequences in order. Positions restart at zero
in every sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of a row begin and end; `lengths` is the same on the host, so that nobody asks the device."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    max_length: int


@dataclass(frozen=True)
class PackedRow:
    tokens: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    layout: PackedLayout
    predict_index: Tensor  # [R]
    targets: Tensor  # [R]
    response_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[1])


def pack(
    tokens: Sequence[np.ndarray], response_lengths: Sequence[int], device: torch.device | str = "cpu"
) -> PackedRow:
    """Pack sequences whose last `response_length` tokens are the response (each after at least one prompt token)."""
    lengths = [len(sequence) for sequence in tokens]
    for length, response_length in zip(lengths, response_lengths, strict=True):
        if not 0 < response_length < length:
            raise ValueError(f"a sequence of {length} tokens cannot have {response_length} response tokens to predict")
    ends = np.cumsum(lengths)
    starts = ends - lengths
    row = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in tokens])
    positions = np.arange(len(row)) - np.repeat(starts, lengths)
    target_index = np.concatenate(
        [np.arange(end - response, end) for end, response in zip(ends, response_lengths, strict=True)]
    )
    cu_seqlens = np.concatenate([[0], ends]).astype(np.int32)

    def put(array: np.ndarray) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else host

    return PackedRow(
        tokens=put(row)[None],
        position_ids=put(positions)[None],
        layout=PackedLayout(lengths=tuple(lengths), cu_seqlens=put(cu_seqlens), max_length=max(lengths)),
        predict_index=put(target_index - 1),
        targets=put(row[target_index]),
        response_lengths=tuple(int(length) for length in response_lengths),
    )
