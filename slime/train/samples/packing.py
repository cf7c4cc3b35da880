"""Several sequences as one row, without padding between them.

Invariant: `row.tokens` is the concatenation of the sequences; `row.predict_index[k]` is the position whose hidden state
predicts `row.targets[k]`, and the k run over the response tokens of all sequences in order. Positions restart at zero
in every sequence. Where the length of a row must be a multiple of something, what is missing is a sequence of its own
at the end, of token 0, which predicts nothing. The parts of a row are equally long, and in the order of the ranks they
are the row; so are their targets. `shared` says which tokens are copies of others, for whoever computes each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# What several sequences of a packed row begin with, computed once.
#
# The n samples of a group have one prompt, the samples of a conversation that forked its turns until then, agents
# often their instructions. All that a layer does to a token by itself (norms, projections, MLP, experts) gives the
# same for every copy of it, and attention looks at earlier tokens only, so that copies stay equal through all layers.

WORTH_SHARING = 1 / 8
"""The share of a row's tokens that must be copies: attention takes them all, and spreading them costs time too."""


@dataclass(frozen=True)
class SharedPrompts:
    """Which tokens of a row are computed, and which are copies of them.

    The copies of computed token i are `copies[starts[i]:starts[i + 1]]`, in the order of the row; the first is itself.
    """

    first: Tensor  # [t] where the computed tokens stand in the row, ascending
    place: Tensor  # [T] of which of them each token of the row is a copy
    copies: Tensor  # [T]
    starts: Tensor  # [t + 1]


def find_shared_prompts(
    tokens: Sequence[np.ndarray], padding: int, put: Callable[[np.ndarray], Tensor]
) -> SharedPrompts | None:
    """Those of sequences one behind the other; None where it is not worth it."""
    places: list[np.ndarray] = []
    computed = 0
    for sequence, (lender, length) in zip(tokens, common_beginnings(tokens), strict=True):
        own = len(sequence) - length
        new = np.arange(computed, computed + own)
        places.append(np.concatenate([places[lender][:length], new]) if length else new)
        computed += own
    place = np.concatenate([*places, np.arange(computed, computed + padding)])
    if len(place) - computed - padding < WORTH_SHARING * len(place):
        return None
    copies = np.argsort(place, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(place))])
    return SharedPrompts(first=put(copies[starts[:-1]]), place=put(place), copies=put(copies), starts=put(starts))


def common_beginnings(sequences: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Of each sequence: one before it that begins with as many of its tokens as any, and how many; (0, 0) if with none.

    In alphabetical order what two have in common is the least that neighbours between them have, so the best earlier
    one is the next earlier one on either side.
    """
    letters = [np.asarray(sequence, dtype=">i8").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=letters.__getitem__)
    common = [_common(sequences[one], sequences[next_one]) for one, next_one in pairwise(order)]
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


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    most = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:most]) != np.asarray(other[:most]))
    return int(differs[0]) if len(differs) else most


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
