"""Importance weights and rejection between engine and trainer, against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms.importance import LEVELS, MODES, importance_weights, rejection_mask, unit_mean_scale, weight_sums
from tests.algorithms.ragged import Ragged, leaf, masked_mean, ragged


def reference_log_ratio(batch: Ragged, difference, span: range, t: int, level: str) -> float:
    if level == "token":
        return float(difference[t]) if batch.mask[t] else 0.0
    mean = masked_mean(difference, batch.mask, span)
    return mean if level == "geometric" else sum(float(difference[s]) for s in span if batch.mask[s])


@given(ragged(), st.sampled_from(LEVELS), st.sampled_from(MODES))
def test_importance_weights_match_a_token_loop(batch: Ragged, level: str, mode: str) -> None:
    train, rollout = leaf(batch.numbers(0)), batch.numbers(1)
    lower, upper = 0.5, 2.0
    result = importance_weights(
        train,
        torch.tensor(rollout),
        torch.tensor(batch.mask),
        batch.lengths,
        level=level,
        mode=mode,
        lower=lower,
        upper=upper,
    )
    difference = train.detach().numpy() - rollout
    for span in batch.spans():
        for t in span:
            ratio = math.exp(reference_log_ratio(batch, difference, span, t, level))
            weight = {
                "truncate": min(ratio, upper),
                "clip": min(max(ratio, lower), upper),
                "mask": ratio if lower <= ratio <= upper else 0.0,
            }[mode]
            assert result.ratio[t].item() == pytest.approx(ratio, rel=1e-9)
            assert result.weights[t].item() == pytest.approx(weight, rel=1e-9)
            assert result.out_of_bounds[t].item() == float(abs(weight - ratio) > 1e-12)
    assert not result.weights.requires_grad


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_are_bounded(level, dtype) -> None:
    train = torch.tensor([0.0, 0.0, -500.0, -math.inf], dtype=dtype)
    rollout = torch.tensor([-500.0, math.nan, 0.0, 0.0], dtype=dtype)
    result = importance_weights(
        train, rollout, torch.tensor([1, 0, 1, 1]), [2, 1, 1], level=level, mode="clip", lower=0.0, upper=1e30
    )
    first = math.exp(20)
    expected = [first, 1.0 if level == "token" else first, math.exp(-20), math.exp(-20)]
    assert result.weights.dtype == dtype
    assert result.weights.tolist() == pytest.approx(expected, rel=1e-5)


@given(ragged())
def test_normalized_weights_have_a_masked_mean_of_one(batch: Ragged) -> None:
    weights, mask = torch.tensor(batch.numbers(0)).abs(), torch.tensor(batch.mask)
    cut = len(batch.lengths) // 2  # the result does not depend on how the step is split
    first, second, half = batch.lengths[:cut], batch.lengths[cut:], sum(batch.lengths[:cut])
    parts = ((weights[:half], mask[:half], first), (weights[half:], mask[half:], second))
    total, count = sum(weight_sums(*part, "token") for part in parts).tolist()
    kept = [w for w, m in zip(weights.tolist(), batch.mask, strict=True) if m]
    assert count == len(kept)
    assert unit_mean_scale(total, count) == pytest.approx(len(kept) / sum(kept) if kept else 1.0, rel=1e-12)


def test_sequence_level_counts_each_sequence_once() -> None:
    """Weights 2, 4 and 9 for sequences of four, one and two tokens; the last is fully masked, so the mean is 3."""
    weights = torch.tensor([2.0] * 4 + [4.0] + [9.0] * 2)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    assert weight_sums(weights, mask, [4, 1, 2], "sequence").tolist() == [6.0, 2.0]
    assert weight_sums(weights, mask, [4, 1, 2], "token").tolist() == [10.0, 4.0]


def test_scale_of_all_zero_weights_is_one() -> None:
    assert unit_mean_scale(*weight_sums(torch.zeros(3), torch.ones(3), [3], "token").tolist()) == 1.0


@given(ragged(), st.sampled_from(LEVELS), st.sampled_from([None, 0.3]))
def test_rejection_mask_matches_a_token_loop(batch: Ragged, level: str, veto: float | None) -> None:
    train, rollout = leaf(batch.numbers(0, 0.7)), batch.numbers(1, 0.7)
    kept = rejection_mask(
        train,
        torch.tensor(rollout),
        torch.tensor(batch.mask),
        batch.lengths,
        level=level,
        lower=0.5,
        upper=2.0,
        veto_threshold=veto,
    )
    difference = train.detach().numpy() - rollout
    expected = []
    for span in batch.spans():
        vetoed = veto is not None and any(batch.mask[t] and math.exp(difference[t]) < veto for t in span)
        for t in span:
            inside = 0.5 <= math.exp(reference_log_ratio(batch, difference, span, t, level)) <= 2.0
            expected.append(float(bool(batch.mask[t]) and inside and not vetoed))
    assert kept.tolist() == expected
    assert not kept.requires_grad


def test_veto_threshold_below_the_weight_clamp_is_applied() -> None:
    train, rollout = torch.tensor([-30.0, -1.0, -1.0, -15.0]), torch.tensor([-1.0, -1.0, -1.0, -1.0])
    kept = rejection_mask(
        train, rollout, torch.ones(4), [2, 2], level="token", lower=0.0, upper=2.0, veto_threshold=1e-10
    )
    assert kept.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_nan_ratio_is_rejected() -> None:
    kept = rejection_mask(
        torch.tensor([math.nan, -1.0]), torch.zeros(2), torch.ones(2), [1, 1], level="token", lower=0.0, upper=2.0
    )
    assert kept.tolist() == [0.0, 1.0]


def test_rejects_unknown_levels_and_modes() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="unknown level 'word'"):
        importance_weights(zeros, zeros, zeros, [1], level="word", mode="clip", lower=0.0, upper=1.0)
    with pytest.raises(ValueError, match="unknown mode 'cut'"):
        importance_weights(zeros, zeros, zeros, [1], level="token", mode="cut", lower=0.0, upper=1.0)
