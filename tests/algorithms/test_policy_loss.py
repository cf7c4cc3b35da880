"""PPO, GSPO, CISPO and off-policy sequence masking: values and gradients token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms.policy_loss import cispo_loss, clipped_policy_loss, off_policy_sequence_mask, sequence_log_ratio
from slime.algorithms.reduce import weighted_sum
from tests.algorithms.ragged import Ragged, leaf, masked_mean, ragged

DUAL = st.sampled_from([None, 1.5, 3.0])
LOW, HIGH = 0.2, 0.3


def surrogate(log_ratio: float, advantage: float, dual: float | None) -> tuple[float, float, float]:
    """Return the loss, its derivative with respect to the log-ratio, and whether the clipped branch was taken."""
    ratio = math.exp(log_ratio)
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    is_clipped = (advantage > 0 and ratio > 1 + HIGH) or (advantage < 0 and ratio < 1 - LOW)
    loss, slope = (-bounded * advantage, 0.0) if is_clipped else (-ratio * advantage, -ratio * advantage)
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss, slope = -dual * advantage, 0.0
    return loss, slope, float(is_clipped)


@given(ragged(), DUAL)
def test_ppo_loss_matches_a_token_loop(batch: Ragged, dual: float | None) -> None:
    log_ratio, advantages, upstream = leaf(batch.numbers(0, 0.8)), batch.numbers(1), batch.numbers(2)
    loss, clipped = clipped_policy_loss(
        log_ratio, torch.tensor(advantages), eps_clip=LOW, eps_clip_high=HIGH, eps_clip_c=dual
    )
    (loss * torch.tensor(upstream)).sum().backward()
    expected = [surrogate(x, a, dual) for x, a in zip(log_ratio.tolist(), advantages, strict=True)]
    assert loss.tolist() == pytest.approx([e[0] for e in expected], abs=1e-12)
    assert clipped.tolist() == [e[2] for e in expected]
    gradient = [e[1] * u for e, u in zip(expected, upstream, strict=True)]
    assert log_ratio.grad.tolist() == pytest.approx(gradient, abs=1e-12)


@given(ragged(), DUAL)
def test_gspo_gradient_flows_through_the_mean_of_the_sequence(batch: Ragged, dual: float | None) -> None:
    log_probs, old, upstream = leaf(batch.numbers(0)), batch.numbers(1), batch.numbers(3)
    advantages = np.concatenate([np.full(n, batch.numbers(2)[i]) for i, n in enumerate(batch.lengths)])
    log_ratio = sequence_log_ratio(log_probs, torch.tensor(old), torch.tensor(batch.mask), batch.lengths)
    loss, _ = clipped_policy_loss(
        log_ratio, torch.tensor(advantages), eps_clip=LOW, eps_clip_high=HIGH, eps_clip_c=dual
    )
    (loss * torch.tensor(upstream)).sum().backward()
    difference = log_probs.detach().numpy() - old
    for span in batch.spans():
        mean, count = masked_mean(difference, batch.mask, span), max(sum(batch.mask[t] for t in span), 1)
        expected = [surrogate(mean, advantages[t], dual) for t in span]
        by_mean = sum(e[1] * upstream[t] for e, t in zip(expected, span, strict=True))
        for e, t in zip(expected, span, strict=True):
            assert log_ratio[t].item() == pytest.approx(mean, abs=1e-12)
            assert loss[t].item() == pytest.approx(e[0], abs=1e-12)
            assert log_probs.grad[t].item() == pytest.approx(by_mean * batch.mask[t] / count, abs=1e-12)


@given(ragged(), st.sampled_from([0.2, 1.0, 5.0]))
def test_cispo_loss_matches_a_token_loop(batch: Ragged, low: float) -> None:
    log_probs, advantages = leaf(batch.numbers(0)), batch.numbers(1)
    log_ratio = leaf(batch.numbers(2, 0.8))
    loss, clipped = cispo_loss(log_probs, log_ratio, torch.tensor(advantages), eps_clip=low, eps_clip_high=HIGH)
    loss.sum().backward()
    assert log_ratio.grad is None
    for t, advantage in enumerate(advantages):
        ratio = math.exp(log_ratio[t].item())
        weight = min(max(ratio, 1 - low), 1 + HIGH)
        assert loss[t].item() == pytest.approx(-weight * advantage * log_probs[t].item(), abs=1e-12)
        assert log_probs.grad[t].item() == pytest.approx(-weight * advantage, abs=1e-12)
        assert clipped[t].item() == float(ratio < 1 - low or ratio > 1 + HIGH)


@given(ragged(), st.sampled_from([0.0, 0.1, 1.0]))
def test_opsm_drops_off_policy_sequences_with_negative_advantage(batch: Ragged, delta: float) -> None:
    log_probs, old, advantages = leaf(batch.numbers(0)), batch.numbers(1), batch.numbers(2)
    keep = off_policy_sequence_mask(
        log_probs,
        torch.tensor(old),
        torch.tensor(advantages),
        torch.tensor(batch.mask),
        batch.lengths,
        delta=delta,
    )
    difference = old - log_probs.detach().numpy()
    expected = [
        0.0 if advantages[t] < 0 and masked_mean(difference, batch.mask, span) > delta else 1.0
        for span in batch.spans()
        for t in span
    ]
    assert keep.tolist() == expected
    assert not keep.requires_grad


def test_opsm_keeps_fully_masked_sequences() -> None:
    keep = off_policy_sequence_mask(
        torch.full((2,), -9.0), torch.zeros(2), torch.full((2,), -1.0), torch.tensor([0, 1]), [1, 1], delta=0.1
    )
    assert keep.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_keep_losses_and_gradients_finite(dtype) -> None:
    extremes = [-1e4, -90.0, 90.0, 1e4, math.inf]
    for advantage in (1.0, -1.0):
        log_ratio = torch.tensor([*extremes, 0.0], dtype=dtype, requires_grad=True)
        advantages = torch.full_like(log_ratio, advantage)
        loss, _ = clipped_policy_loss(log_ratio, advantages, eps_clip=LOW, eps_clip_high=HIGH, eps_clip_c=3.0)
        upper = [-(1 + HIGH)] * 3 if advantage > 0 else [3.0] * 3
        lower = [0.0, 0.0] if advantage > 0 else [1 - LOW] * 2
        assert loss.dtype == dtype
        assert loss.tolist() == pytest.approx([*lower, *upper, -advantage], abs=1e-6)
        loss.sum().backward()
        assert log_ratio.grad.tolist() == pytest.approx([0.0] * 5 + [-advantage], abs=1e-12)


def test_extreme_ratio_at_a_masked_token_keeps_other_gradients() -> None:
    log_ratio = torch.tensor([0.0, 500.0], requires_grad=True)
    loss, _ = clipped_policy_loss(log_ratio, torch.tensor([-2.0, -2.0]), eps_clip=LOW, eps_clip_high=HIGH)
    weighted_sum(loss, torch.tensor([0.5, 0.0])).backward()
    assert log_ratio.grad.tolist() == [1.0, 0.0]
