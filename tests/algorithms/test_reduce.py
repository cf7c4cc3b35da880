"""Weights of the three loss reductions, and the weighted sum that uses them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from slime.algorithms.reduce import constant_weights, per_rollout_weights, per_token_weights, weighted_sum
from tests.algorithms.ragged import Ragged, leaf, masked_mean, ragged


@given(ragged())
def test_each_reduction_matches_its_mean(batch: Ragged) -> None:
    values, mask, n = leaf(batch.numbers(0)), torch.tensor(batch.mask), len(batch.lengths)
    counts = [sum(batch.mask[t] for t in span) for span in batch.spans()]
    sums = torch.tensor([counts[i] for i, span in enumerate(batch.spans()) for _ in span])
    by_rollout = weighted_sum(values, per_rollout_weights(mask, sums, n))
    numbers = values.detach().numpy()
    expected = sum(masked_mean(numbers, batch.mask, span) for span in batch.spans()) / n
    assert by_rollout.item() == pytest.approx(expected, abs=1e-12)
    kept = sum(float(v) for v, m in zip(numbers, batch.mask, strict=True) if m)
    by_token = weighted_sum(values, per_token_weights(mask, int(sum(counts))))
    assert by_token.item() == pytest.approx(kept / max(sum(counts), 1), abs=1e-12)
    constant = weighted_sum(values, constant_weights(mask, 64, n))
    assert constant.item() == pytest.approx(kept / 64 / n, abs=1e-12)
    constant.backward()
    assert values.grad.tolist() == pytest.approx((batch.mask / 64 / n).tolist(), abs=1e-15)


def test_a_fanned_out_rollout_counts_once() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 50.0])
    mask = torch.tensor([1, 1, 1, 1, 0])
    # two samples (2 + 1 tokens) of rollout A with 3 unmasked tokens, one sample of rollout B with 1 unmasked token
    sums = torch.tensor([3, 3, 3, 1, 1])
    total = weighted_sum(values, per_rollout_weights(mask, sums, 2))
    assert total.item() == pytest.approx(((1 + 2 + 3) / 3 + 4 / 1) / 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(torch.int64, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_weight_dtype_follows_the_mask_dtype(given, expected) -> None:
    mask, sums = torch.tensor([1, 0]).to(given), torch.tensor([3, 3])
    assert per_rollout_weights(mask, sums, 2).dtype == expected
    assert per_rollout_weights(mask, sums, 2).tolist() == pytest.approx([1 / 6, 0.0])
    assert per_token_weights(mask, 4).dtype == constant_weights(mask, 4, 2).dtype == expected


def test_masked_non_finite_values_do_not_affect_sum_or_gradient() -> None:
    values = torch.tensor([1.0, math.inf, math.nan], requires_grad=True)
    total = weighted_sum(values, torch.tensor([0.5, 0.0, 0.0]))
    total.backward()
    assert total.item() == 0.5
    assert values.grad.tolist() == [0.5, 0.0, 0.0]


def test_fully_masked_rollout_has_zero_weights() -> None:
    assert per_rollout_weights(torch.zeros(2), torch.zeros(2), 1).tolist() == [0.0, 0.0]
