"""Several sequences as one row, without padding between them.

Invariant: `row.tokens` is the concatenation of the sequences; `row.predict_index[k]` is the position whose hidden state
predicts `row.targets[k]`, and the k run over the response tokens of all sequences in order. Positions restart at zero
in every sequence. Where the length of a row must be a multiple of something, what is missing is a sequence of its own
at the end, of token 0, which predicts nothing. The parts of a row are equally long, and in the order of the ranks they
are the row; so are their targets. `shared` says which tokens are copies of others, for whoever computes each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from slime.train.samples.shared_prompts import SharedPrompts, find_shared_prompts


@dataclass(frozen=True)
class PackedLayout:
    """Where the sequences of a row begin and end, padding included; `lengths` is the same on the host, so that nobody
    asks the device."""

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
    shared: SharedPrompts | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def total_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence that is data, prompt and response."""
        return self.layout.lengths[: len(self.response_lengths)]

    def part(self, rank: int, size: int) -> RowPart:
        """The tokens of one of `size` ranks that share the row."""
        if size == 1:
            counts = (sum(self.response_lengths),)
            return RowPart(self.tokens, self.position_ids, self.predict_index, self.targets, counts)
        length, rest = divmod(self.num_tokens, size)
        if rest:
            raise ValueError(f"a row of {self.num_tokens} tokens has no {size} equal parts: pack it to a multiple")
        before = self._predicted_before([length * place for place in range(size + 1)])
        own, predicted = slice(length * rank, length * (rank + 1)), slice(before[rank], before[rank + 1])
        return RowPart(
            tokens=self.tokens[:, own],
            position_ids=self.position_ids[:, own],
            predict_index=self.predict_index[predicted] - own.start,
            targets=self.targets[predicted],
            counts=tuple(end - begin for begin, end in pairwise(before)),
        )

    def _predicted_before(self, bounds: Sequence[int]) -> list[int]:
        """How many response tokens are predicted at positions below each bound; from what the host knows."""
        lengths, responses = np.array(self.total_lengths), np.array(self.response_lengths)
        first = np.cumsum(lengths) - responses - 1
        return [int(np.clip(bound - first, 0, responses).sum()) for bound in bounds]


@dataclass(frozen=True)
class RowPart:
    """A rank's tokens of a row, and the response tokens that are predicted from them."""

    tokens: Tensor  # [1, t]
    position_ids: Tensor  # [1, t]
    predict_index: Tensor  # [r], from the part's first token
    targets: Tensor  # [r]
    counts: tuple[int, ...]  # r of every rank


def pack(
    tokens: Sequence[np.ndarray],
    response_lengths: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    multiple: int = 1,
    share_prompts: bool = False,
) -> PackedRow:
    """Pack sequences whose last `response_length` tokens are the response (each after at least one prompt token).

    The row is padded to a multiple of `multiple` tokens. With `share_prompts` it says which tokens are the same.
    """
    lengths = [len(sequence) for sequence in tokens]
    for length, response_length in zip(lengths, response_lengths, strict=True):
        if not 0 < response_length < length:
            raise ValueError(f"a sequence of {length} tokens cannot have {response_length} response tokens to predict")
    padding = -sum(lengths) % multiple
    padded = [*lengths, padding] if padding else lengths
    ends = np.cumsum(padded)
    starts = ends - padded
    row = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in (*tokens, np.zeros(padding, np.int64))])
    positions = np.arange(len(row)) - np.repeat(starts, padded)
    target_index = np.concatenate(
        [np.arange(end - response, end) for end, response in zip(np.cumsum(lengths), response_lengths, strict=True)]
    )
    cu_seqlens = np.concatenate([[0], ends]).astype(np.int32)

    def put(array: np.ndarray) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else host

    return PackedRow(
        tokens=put(row)[None],
        position_ids=put(positions)[None],
        layout=PackedLayout(lengths=tuple(padded), cu_seqlens=put(cu_seqlens), max_length=max(padded)),
        predict_index=put(target_index - 1),
        targets=put(row[target_index]),
        response_lengths=tuple(int(length) for length in response_lengths),
        shared=find_shared_prompts(tokens, padding, put) if share_prompts else None,
    )
