"""A packed row as one rank of a context has it: two slices of every sequence, first with last.

Invariant: the ranks of a context have every token of the row once. Each sequence is cut into `2 n` slices of equal
length and rank r has slices r and `2 n - 1 - r`, so that all have the same work under a causal mask; what a sequence
lacks to be cut that way is token 0 at its end, which nothing before it sees. What the row lacks then is a sequence of
its own. Numbers that the ranks computed for their response tokens are put back in the order of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slime.train.backends.megatron.layout import Layout
from slime.train.samples.packing import PackedLayout, PackedRow
from slime.train.topology import Ranks, gather_parts

Indices = np.ndarray


@dataclass(frozen=True)
class RowSlices:
    """What one rank computes with."""

    tokens: Tensor  # [1, t]
    position_ids: Tensor  # [1, t]
    layout: PackedLayout  # of the whole sequences, padding included
    predict_index: Tensor  # [r], where in the slices the hidden state is that predicts
    targets: Tensor  # [r]
    counts: tuple[int, ...]  # r of every rank
    order: Tensor | None  # [R]: where each number of the row is among those of all ranks; None where it is there
    places: Tensor | None  # [T]: the same for tokens
    source: Indices | None  # [t]: the token of the row that each one is, one past its end for padding; None: all are

    def responses(self, own: Tensor, ranks: Ranks) -> Tensor:
        """[R, ...] of what the ranks have computed for their `r` response tokens."""
        if self.order is None:
            return own
        return gather_parts(own, self.counts, ranks).index_select(0, self.order)

    def whole(self, own: Tensor, ranks: Ranks) -> Tensor:
        """[T, ...] of what the ranks have computed for their `t` tokens, padding left out."""
        gathered = gather_parts(own, [len(own)] * ranks.size, ranks)
        return gathered if self.places is None else gathered.index_select(0, self.places)


def slice_row(row: PackedRow, layout: Layout, rank: int) -> RowSlices:
    """The slices of one rank of the context; from what the host knows, so that nobody waits for the device."""
    size, device = layout.context, row.tokens.device
    lengths = np.array(row.layout.lengths)
    padded = -(-lengths // layout.sequence_unit) * layout.sequence_unit
    rest = int(-padded.sum() % layout.token_unit)
    if rest:
        lengths, padded = np.append(lengths, 0), np.append(padded, rest)
    owner, local = _places(lengths, padded, size)
    own_length = int(padded.sum()) // size
    source = np.full(own_length, row.num_tokens)  # padding: one past the row
    mine = np.flatnonzero(owner == rank)
    source[local[mine]] = mine
    predicting = _predicting(row)
    predicted_by, predicted_at = owner[predicting], local[predicting]
    own_responses = np.flatnonzero(predicted_by == rank)

    def put(array: Indices) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    bounds = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    in_place = size == 1 and own_length == row.num_tokens
    extended = torch.cat([row.tokens[0], row.tokens.new_zeros(1)])
    return RowSlices(
        tokens=row.tokens if in_place else extended.index_select(0, put(source))[None],
        position_ids=put(_positions(padded, size, rank))[None],
        layout=PackedLayout(tuple(padded.tolist()), put(bounds), int(padded.max())),
        predict_index=put(predicted_at[own_responses]),
        targets=row.targets if size == 1 else row.targets.index_select(0, put(own_responses)),
        counts=tuple(np.bincount(predicted_by, minlength=size).tolist()),
        order=None if size == 1 else put(np.argsort(np.argsort(predicted_by, kind="stable"))),
        places=None if in_place else put(owner * own_length + local),
        source=None if in_place else source,
    )


def _places(lengths: Indices, padded: Indices, size: int) -> tuple[Indices, Indices]:
    """For each token of the row: the rank that has it, and where among that rank's tokens."""
    ends = np.cumsum(lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    starts = (np.cumsum(padded) - padded) // size
    if size == 1:
        return np.zeros_like(offset), starts[sequence] + offset
    slice_length = (padded // (2 * size))[sequence]
    number = offset // slice_length
    second = number >= size
    owner = np.where(second, 2 * size - 1 - number, number)
    return owner, starts[sequence] + offset % slice_length + np.where(second, slice_length, 0)


def _positions(padded: Indices, size: int, rank: int) -> Indices:
    """Positions within their sequences of a rank's tokens, padding included."""
    own = padded // size
    within = np.arange(int(own.sum())) - np.repeat(np.cumsum(own) - own, own)
    if size == 1:
        return within
    slice_length = np.repeat(padded // (2 * size), own)
    second = within >= slice_length
    number = np.where(second, 2 * size - 1 - rank, rank)
    return number * slice_length + within - np.where(second, slice_length, 0)


def _predicting(row: PackedRow) -> Indices:
    """Where in the row each response token is predicted; `row.predict_index` without asking the device."""
    responses = np.array(row.response_lengths)
    first = np.cumsum(row.total_lengths) - responses - 1
    within = np.arange(int(responses.sum())) - np.repeat(np.cumsum(responses) - responses, responses)
    return np.repeat(first, responses) + within
