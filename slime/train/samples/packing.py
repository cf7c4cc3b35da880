"""Packs sequences into rows without padding between them.

Invariant: `row.tokens` is the concatenation of the sequences; `row.predict_index[k]` is the position whose hidden state
predicts `row.targets[k]`, and k runs over the response tokens of all sequences in order. Positions restart at zero in
every sequence. If the length of a row must be a multiple of some number, the padding is a sequence of its own at the
end, of token 0, which predicts nothing. The parts of a row have equal lengths; concatenated in rank order, they and
their targets give the row and its targets. `shared` lists tokens that are copies of others, for backends that compute
each distinct token once.

Shared prompts: the n samples of a group have one prompt, the samples of a forked conversation share earlier turns, and
agents often share instructions. The per-token operations of a layer (norms, projections, MLP, experts) give the same
result for all copies of a token, and attention uses earlier tokens only, so copies stay equal through all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

WORTH_SHARING = 1 / 8
"""Minimum share of copies in a row: attention processes all tokens anyway, and scattering results takes time."""


@dataclass(frozen=True)
class SharedPrompts:
    """The computed tokens of a row and their copies.

    The copies of computed token i are `copies[starts[i]:starts[i + 1]]`, in the order of the row; the first one is
    token i itself.
    """

    first: Tensor  # [t] positions of the computed tokens in the row, ascending
    place: Tensor  # [T] index of the computed token of which each token of the row is a copy
    copies: Tensor  # [T]
    starts: Tensor  # [t + 1]


def find_shared_prompts(
    tokens: Sequence[np.ndarray], padding: int, put: Callable[[np.ndarray], Tensor]
) -> SharedPrompts | None:
    """Find the shared prompts of sequences packed in this order; None if there are too few copies."""
    places: list[np.ndarray] = []
    computed = 0
    for sequence, (source, length) in zip(tokens, common_beginnings(tokens), strict=True):
        own = len(sequence) - length
        new = np.arange(computed, computed + own)
        places.append(np.concatenate([places[source][:length], new]) if length else new)
        computed += own
    place = np.concatenate([*places, np.arange(computed, computed + padding)])
    if len(place) - computed - padding < WORTH_SHARING * len(place):
        return None
    copies = np.argsort(place, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(place))])
    return SharedPrompts(first=put(copies[starts[:-1]]), place=put(place), copies=put(copies), starts=put(starts))


def common_beginnings(sequences: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Return for each sequence the earlier sequence with the longest common prefix, and its length; else (0, 0).

    In lexicographic order the common prefix of two sequences is the shortest of the neighbours between them, so the
    best earlier sequence is the next earlier one on either side.
    """
    letters = [np.asarray(sequence, dtype=">i8").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=letters.__getitem__)
    common = []
    for one, next_one in pairwise(order):
        most = min(len(sequences[one]), len(sequences[next_one]))
        differs = np.flatnonzero(np.asarray(sequences[one][:most]) != np.asarray(sequences[next_one][:most]))
        common.append(int(differs[0]) if len(differs) else most)
    found = [(0, 0)] * len(sequences)
    for rank, index in enumerate(order):
        for step in (-1, 1):
            least, at = len(sequences[index]), rank
            while 0 <= at + step < len(order) and least > found[index][1]:
                least = min(least, common[min(at, at + step)])
                at += step
                if order[at] < index:
                    found[index] = max(found[index], (order[at], least), key=lambda one: one[1])
                    break
    return found


@dataclass(frozen=True)
class PackedLayout:
    """Bounds of the sequences of a row, padding included; `lengths` is on the host, to avoid device transfers."""

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
        """Number of tokens of each sequence (prompt and response), without padding."""
        return self.layout.lengths[: len(self.response_lengths)]

    def part(self, rank: int, size: int) -> RowPart:
        """Return the part of one of `size` ranks that share the row."""
        if size == 1:
            counts = (sum(self.response_lengths),)
            return RowPart(self.tokens, self.position_ids, self.predict_index, self.targets, counts)
        length, rest = divmod(self.num_tokens, size)
        if rest:
            raise ValueError(
                f"a row of {self.num_tokens} tokens cannot be split into {size} equal parts: pack it to a multiple"
            )
        lengths, responses = np.array(self.total_lengths), np.array(self.response_lengths)
        first = np.cumsum(lengths) - responses - 1
        bounds = [length * place for place in range(size + 1)]
        # response tokens that are predicted at positions below each bound, from host data
        before = [int(np.clip(bound - first, 0, responses).sum()) for bound in bounds]
        own, predicted = slice(length * rank, length * (rank + 1)), slice(before[rank], before[rank + 1])
        return RowPart(
            tokens=self.tokens[:, own],
            position_ids=self.position_ids[:, own],
            predict_index=self.predict_index[predicted] - own.start,
            targets=self.targets[predicted],
            counts=tuple(end - begin for begin, end in pairwise(before)),
        )


@dataclass(frozen=True)
class RowPart:
    """A rank's tokens of a row, and the response tokens that they predict."""

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

    The row is padded to a multiple of `multiple` tokens. With `share_prompts` it lists duplicate tokens.
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
