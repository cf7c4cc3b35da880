"""Tests the slicing of packed rows for context parallelism: token slices, positions and restored order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.config import Config
from slime.train.backends.megatron.cp_rows import RowSlices, slice_row
from slime.train.backends.megatron.layout import Layout
from slime.train.samples.packing import PackedRow, pack
from slime.train.topology import Ranks

LENGTHS = [(9, 4), (2, 1), (16, 15), (5, 2), (3, 1)]
ALONE = Ranks(0, 1, torch.device("cpu"))


def packed_row(multiple: int = 1) -> PackedRow:
    total = sum(length for length, _ in LENGTHS)
    tokens = np.arange(1, total + 1)
    ends = np.cumsum([length for length, _ in LENGTHS])
    return pack(np.split(tokens, ends[:-1]), [response for _, response in LENGTHS], multiple=multiple)


def expected_slices(row: PackedRow, layout: Layout, rank: int) -> list[int]:
    """Return the tokens of a rank, sequence by sequence, from the definition."""
    found: list[int] = []
    total = 0
    for sequence in row.tokens[0].split(row.layout.lengths):
        padded = sequence.tolist() + [0] * (-len(sequence) % layout.sequence_multiple)
        total += len(padded)
        slices = np.split(np.array(padded), 2 * layout.context) if layout.context > 1 else [np.array(padded)]
        found += slices[rank].tolist() + (slices[2 * layout.context - 1 - rank].tolist() if layout.context > 1 else [])
    return found + [0] * (-total % layout.row_multiple // layout.context)


LAYOUTS = [
    Layout(),
    Layout(context=2),
    Layout(context=3),
    Layout(context=4),
    Layout(tensor=4, sequence_parallel=True),
    Layout(tensor=4),
    Layout(context=2, tensor=3, sequence_parallel=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("multiple", [1, 8])
def test_ranks_hold_mirrored_slices_of_each_sequence(layout, multiple) -> None:
    row = packed_row(multiple)
    for rank in range(layout.context):
        slices = slice_row(row, layout, rank)
        assert slices.tokens.tolist() == [expected_slices(row, layout, rank)]
        lengths = slices.layout.lengths
        assert sum(lengths) == slices.tokens.shape[1] * layout.context
        assert sum(lengths) % layout.row_multiple == 0
        assert all(length % layout.sequence_multiple == 0 for length in lengths)
        assert slices.layout.cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
        assert slices.layout.max_length == max(lengths)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_positions_count_from_sequence_start(layout) -> None:
    row = packed_row()
    position_of = dict(zip(row.tokens[0].tolist(), row.position_ids[0].tolist(), strict=True))
    for rank in range(layout.context):
        slices = slice_row(row, layout, rank)
        pairs = zip(slices.tokens[0].tolist(), slices.position_ids[0].tolist(), strict=True)
        assert all(position == position_of[token] for token, position in pairs if token)
    everything = sorted(
        p for rank in range(layout.context) for p in slice_row(row, layout, rank).position_ids[0].tolist()
    )
    lengths = slice_row(row, layout, 0).layout.lengths
    assert everything == sorted(p for length in lengths for p in range(length))


def join_ranks(found: list[Tensor], slices: RowSlices, order: Tensor | None) -> Tensor:
    """Compute the result of the ranks' collective in one process."""
    return torch.cat(found) if order is None else torch.cat(found).index_select(0, order)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gathered_values_are_in_row_order(layout) -> None:
    row = packed_row(8)
    ranks = [slice_row(row, layout, rank) for rank in range(layout.context)]
    for rank, slices in enumerate(ranks):
        assert slices.counts == tuple(len(other.targets) for other in ranks)
        assert len(slices.predict_index) == slices.counts[rank]
    by_token = [slices.tokens[0] for slices in ranks]
    predicting = [slices.tokens[0][slices.predict_index] for slices in ranks]
    assert torch.equal(join_ranks(by_token, ranks[0], ranks[0].places), row.tokens[0])
    assert torch.equal(join_ranks(predicting, ranks[0], ranks[0].order), row.tokens[0][row.predict_index])
    assert torch.equal(join_ranks([slices.targets for slices in ranks], ranks[0], ranks[0].order), row.targets)


def test_row_that_fits_is_not_copied() -> None:
    row = packed_row()
    slices = slice_row(row, Layout(tensor=2), 0)
    assert slices.tokens is row.tokens
    assert slices.targets is row.targets
    values = torch.arange(len(row.targets))
    assert slices.responses(values, ALONE) is values
    assert slices.whole(row.tokens[0], ALONE) is not None


def test_layout_follows_the_flags() -> None:
    config = Config(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        num_layers_per_virtual_pipeline_stage=3,
        context_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    layout = Layout.from_config(config, num_layers=12, world=32)
    assert (layout.data, layout.expert_data, layout.virtual, layout.copy) == (4, 4, 2, 8)
    assert (layout.sequence_multiple, layout.row_multiple) == (4, 8)
    plain = Layout.from_config(Config(sequence_parallel=True), num_layers=12, world=2)
    assert (plain.data, plain.virtual, plain.sequence_parallel, plain.row_multiple) == (2, 1, False, 1)


def test_explicit_pipeline_layout_determines_virtual_stages() -> None:
    config = Config(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*3|(tt|)*2tL")
    assert Layout.from_config(config, num_layers=8, world=2).virtual == 2
