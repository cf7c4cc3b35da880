"""Split of a packed row across context-parallel ranks: each rank has two slices of every sequence.

Invariant: the n ranks have every token of the row once. Each sequence is padded with token 0 at its end, which no
earlier token sees, and split into `2 n` slices of equal length. Rank r has slices r and `2 n - 1 - r`, so that all have
the same work under a causal mask. If the row then needs more padding, it is a sequence of its own. The ranks' numbers
for their response tokens are returned to the order of the row.
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
    """The part of a packed row that one rank computes."""

    tokens: Tensor  # [1, t]
    position_ids: Tensor  # [1, t]
    layout: PackedLayout  # of the whole sequences, padding included
    predict_index: Tensor  # [r], index in the slices of the hidden state that predicts each target
    targets: Tensor  # [r]
    counts: tuple[int, ...]  # r of every rank
    order: Tensor | None  # [R]: index of each number of the row in those of all ranks; None: already in order
    places: Tensor | None  # [T]: the same for tokens
    source: Indices | None  # [t]: index of each token in the row, one past its end for padding; None: same as the row

    def responses(self, own: Tensor, ranks: Ranks) -> Tensor:
        """Gather [R, ...] from the ranks' results for their `r` response tokens."""
        if self.order is None:
            return own
        return gather_parts(own, self.counts, ranks).index_select(0, self.order)

    def whole(self, own: Tensor, ranks: Ranks) -> Tensor:
        """Gather [T, ...] from the ranks' results for their `t` tokens, without padding."""
        gathered = gather_parts(own, [len(own)] * ranks.size, ranks)
        return gathered if self.places is None else gathered.index_select(0, self.places)


def slice_row(row: PackedRow, layout: Layout, rank: int) -> RowSlices:
    """Build the slices of one context-parallel rank from data on the host, without device synchronisation."""
    size, device = layout.context, row.tokens.device
    lengths = np.array(row.layout.lengths)
    padded = -(-lengths // layout.sequence_multiple) * layout.sequence_multiple
    rest = int(-padded.sum() % layout.row_multiple)
    if rest:
        lengths, padded = np.append(lengths, 0), np.append(padded, rest)
    owner, local = owners_and_offsets(lengths, padded, size)
    own_length = int(padded.sum()) // size
    source = np.full(own_length, row.num_tokens)  # padding: one past the row
    mine = np.flatnonzero(owner == rank)
    source[local[mine]] = mine
    # where in the row each response token is predicted: `row.predict_index`, computed on the host
    responses = np.array(row.response_lengths)
    first = np.cumsum(row.total_lengths) - responses - 1
    within = np.arange(int(responses.sum())) - np.repeat(np.cumsum(responses) - responses, responses)
    predicting = np.repeat(first, responses) + within
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


def owners_and_offsets(lengths: Indices, padded: Indices, size: int) -> tuple[Indices, Indices]:
    """Return for each token of the row the rank that has it, and its index in that rank's tokens."""
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
    """Return the positions of a rank's tokens in their sequences, padding included."""
    own = padded // size
    within = np.arange(int(own.sum())) - np.repeat(np.cumsum(own) - own, own)
    if size == 1:
        return within
    slice_length = np.repeat(padded // (2 * size), own)
    second = within >= slice_length
    number = np.where(second, 2 * size - 1 - rank, rank)
    return number * slice_length + within - np.where(second, slice_length, 0)
