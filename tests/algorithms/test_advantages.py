"""GRPO, REINFORCE++, distillation and whitening: from rewards to token advantages."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms.advantages import (
    EstimatorInputs,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    reverse_kl,
    subtract_reverse_kl,
    whiten,
    whitening_sums,
)
from tests.algorithms.ragged import Ragged, leaf, ragged


def test_grpo_spreads_the_reward_over_the_response() -> None:
    advantages, returns = grpo_advantages(EstimatorInputs([0.5, -1.0], [torch.ones(3), torch.zeros(1)]))
    assert [a.tolist() for a in advantages] == [[0.5, 0.5, 0.5], [-1.0]]
    assert [r.tolist() for r in returns] == [[0.5, 0.5, 0.5], [-1.0]]


@given(ragged(), st.sampled_from([0.0, 0.9, 1.0]), st.booleans(), st.booleans())
def test_reinforce_plus_plus_matches_a_token_loop(batch: Ragged, gamma: float, with_kl: bool, with_turns: bool) -> None:
    rewards = batch.numbers(0)[: len(batch.lengths)].tolist()
    kls, masks = batch.parts(batch.numbers(1)), batch.parts(batch.mask)
    turns = batch.parts(batch.numbers(2) * with_turns)
    kl_or_none, turns_or_none = kls if with_kl else None, turns if with_turns else None
    got, _ = reinforce_plus_plus_advantages(
        EstimatorInputs(rewards, masks, kl_or_none, placed=turns_or_none, kl_coef=0.2, gamma=gamma)
    )
    assert len(got) == len(rewards)
    for i, reward in enumerate(rewards):
        mask, kl = masks[i].tolist(), kls[i].tolist()
        last = max((t for t, m in enumerate(mask) if m), default=None)
        earned = [(-0.2 * kl[t] * mask[t] if with_kl else 0.0) + reward * (t == last) for t in range(len(mask))]
        earned = [own + turn for own, turn in zip(earned, turns[i].tolist(), strict=True)]
        expected = [sum(gamma**k * r for k, r in enumerate(earned[t:])) for t in range(len(mask))]
        assert got[i].tolist() == pytest.approx(expected, abs=1e-12)
        assert got[i].dtype == torch.float64


@given(ragged(), st.booleans())
def test_reinforce_plus_plus_baseline_matches_a_token_loop(batch: Ragged, with_kl: bool) -> None:
    rewards = batch.numbers(0)[: len(batch.lengths)].tolist()
    kls, masks = batch.parts(batch.numbers(1)), batch.parts(batch.mask)
    kl_or_none = kls if with_kl else None
    got, _ = reinforce_plus_plus_baseline_advantages(EstimatorInputs(rewards, masks, kl_or_none, kl_coef=0.2))
    assert len(got) == len(rewards)
    for i, reward in enumerate(rewards):
        charged = [0.2 * k * m if with_kl else 0.0 for k, m in zip(kls[i].tolist(), masks[i].tolist(), strict=True)]
        assert got[i].tolist() == pytest.approx([reward - c for c in charged], abs=1e-12)


def test_reinforce_plus_plus_charges_no_kl_at_masked_tokens() -> None:
    masks = [torch.tensor([0, 0]), torch.tensor([1, 0])]
    kl = [torch.full((2,), math.inf), torch.tensor([0.5, math.nan])]
    given_kl = EstimatorInputs([5.0, 2.0], masks, kl, kl_coef=1.0)
    got, _ = reinforce_plus_plus_advantages(given_kl)
    assert [g.tolist() for g in got] == [[0.0, 0.0], [1.5, 0.0]]
    baseline, _ = reinforce_plus_plus_baseline_advantages(given_kl)
    assert [b.tolist() for b in baseline] == [[5.0, 5.0], [1.5, 2.0]]


def test_result_is_float32_without_kl_and_with_integer_masks() -> None:
    got, _ = reinforce_plus_plus_advantages(EstimatorInputs([1.0], [torch.tensor([1, 1])], kl_coef=0.1, gamma=0.5))
    assert (got[0].dtype, got[0].tolist()) == (torch.float32, [0.5, 1.0])


@given(ragged(), st.sampled_from([0.0, 0.5, 1.0]))
def test_distillation_subtracts_the_reverse_kl(batch: Ragged, coef: float) -> None:
    advantages, student, teacher = (batch.numbers(i) for i in range(3))
    got = subtract_reverse_kl(batch.parts(advantages), batch.parts(student), batch.parts(teacher), coef)
    expected = [a - coef * (s - t) for a, s, t in zip(advantages, student, teacher, strict=True)]
    assert torch.cat(got).tolist() == pytest.approx(expected, abs=1e-12)
    assert [len(g) for g in got] == batch.lengths
    kl = reverse_kl(leaf(student), torch.tensor(teacher))
    assert kl.tolist() == pytest.approx((student - teacher).tolist(), abs=1e-12)
    assert not kl.requires_grad


@given(ragged(), st.integers(0, 5))
def test_whitening_with_partial_sums_equals_whitening_the_whole(batch: Ragged, cut: int) -> None:
    values, mask = torch.tensor(batch.numbers(0, 3.0)), torch.tensor(batch.mask)
    tokens = sum(batch.lengths[:cut])
    sums = whitening_sums(values[:tokens], mask[:tokens]) + whitening_sums(values[tokens:], mask[tokens:])
    got = whiten(values, mask, count=sums[0], total=sums[1], squares=sums[2])
    kept = values[mask != 0].tolist()
    mean = statistics.fmean(kept) if kept else 0.0
    variance = statistics.variance(kept) if len(kept) > 1 else 0.0
    expected = [
        (v - mean) / math.sqrt(variance + 1e-8) if m else v for v, m in zip(values.tolist(), mask.tolist(), strict=True)
    ]
    assert got.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitening_equal_advantages_gives_zero(dtype) -> None:
    values, mask = torch.tensor([0.1, 0.1, 0.1, math.nan], dtype=dtype), torch.tensor([1, 1, 1, 0])
    count, total, squares = whitening_sums(values, mask)
    got = whiten(values, mask, count=count, total=total, squares=squares)
    assert got.dtype == dtype
    assert got[:3].tolist() == pytest.approx([0.0] * 3, abs=1e-9)
