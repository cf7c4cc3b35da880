"""Segment functions against loops: values, gradients, and independence of the sequences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms.reduce import masked_means, segment_sums, spread
from tests.algorithms.ragged import Ragged, leaf, masked_mean, ragged


@given(ragged())
def test_values_match_loops(batch: Ragged) -> None:
    values = batch.numbers(0)
    sums = [sum(float(values[t]) for t in span) for span in batch.spans()]
    means = [masked_mean(values, batch.mask, span) for span in batch.spans()]
    assert segment_sums(torch.tensor(values), batch.lengths).tolist() == pytest.approx(sums, abs=1e-12)
    got = masked_means(torch.tensor(values), torch.tensor(batch.mask), batch.lengths)
    assert got.tolist() == pytest.approx(means, abs=1e-12)
    wide = spread(torch.tensor(means, dtype=torch.float64), batch.lengths).tolist()
    assert wide == [means[i] for i, span in enumerate(batch.spans()) for _ in span]


@given(ragged())
def test_gradients_match_the_formula(batch: Ragged) -> None:
    values, upstream = leaf(batch.numbers(0)), np.arange(1.0, len(batch.lengths) + 1)
    (segment_sums(values, batch.lengths) * torch.tensor(upstream)).sum().backward()
    assert values.grad.tolist() == [upstream[i] for i, span in enumerate(batch.spans()) for _ in span]
    values.grad = None
    (masked_means(values, torch.tensor(batch.mask), batch.lengths) * torch.tensor(upstream)).sum().backward()
    expected = [
        upstream[i] * batch.mask[t] / max(batch.mask[span.start : span.stop].sum(), 1)
        for i, span in enumerate(batch.spans())
        for t in span
    ]
    assert values.grad.tolist() == pytest.approx(expected, abs=1e-12)
    per_sequence, token_upstream = leaf(upstream), batch.numbers(1)
    (spread(per_sequence, batch.lengths) * torch.tensor(token_upstream)).sum().backward()
    wanted = [sum(float(token_upstream[t]) for t in span) for span in batch.spans()]
    assert per_sequence.grad.tolist() == pytest.approx(wanted, abs=1e-12)


@given(ragged(), st.integers(0, 5))
def test_splitting_a_row_between_sequences_is_bitwise_identical(batch: Ragged, cut: int) -> None:
    cut = min(cut, len(batch.lengths))
    tokens = sum(batch.lengths[:cut])
    values, mask = torch.tensor(batch.numbers(0)).float(), torch.tensor(batch.mask).float()
    whole_sums, whole_means = segment_sums(values, batch.lengths), masked_means(values, mask, batch.lengths)
    sums, means, wide = [], [], []
    for part, numbers in ((slice(0, tokens), batch.lengths[:cut]), (slice(tokens, None), batch.lengths[cut:])):
        sums.append(segment_sums(values[part], numbers))
        means.append(masked_means(values[part], mask[part], numbers))
        wide.append(spread(means[-1], numbers))
    assert torch.equal(torch.cat(sums), whole_sums)
    assert torch.equal(torch.cat(means), whole_means)
    assert torch.equal(torch.cat(wide), spread(whole_means, batch.lengths))
    assert whole_means.dtype == torch.float32


def test_non_finite_masked_values_are_ignored() -> None:
    values = torch.tensor([1.0, math.nan, 3.0, math.inf], requires_grad=True)
    means = masked_means(values, torch.tensor([1, 0, 1, 0]), [3, 1])
    means.sum().backward()
    assert means.tolist() == [2.0, 0.0]
    assert values.grad.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_rejects_lengths_that_do_not_sum_to_the_row() -> None:
    with pytest.raises(RuntimeError, match="split"):
        segment_sums(torch.zeros(3), [1, 1])
    with pytest.raises(ValueError, match="longer"):
        spread(torch.zeros(1), [1, 1])
