"""Rewards, advantages, KL, clipped loss and reductions against references written token by token."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from slime.algorithms.advantages import grpo_advantages, whiten, whitening_sums
from slime.algorithms.kl import approximate_kl
from slime.algorithms.policy_loss import clipped_policy_loss
from slime.algorithms.reduce import per_rollout_weights, per_token_weights, weighted_sum
from slime.algorithms.rewards import normalize_group_rewards


def test_uneven_groups_are_normalised_by_index_not_by_counting() -> None:
    rewards = [1.0, 0.0, 5.0, 1.0, 3.0, 7.0]
    groups = [4, 4, 9, 4, 9, 1]
    result = normalize_group_rewards(rewards, groups)
    for group in (4, 9):
        values = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean, std = statistics.mean(values), statistics.stdev(values)
        expected = [(v - mean) / (std + 1e-6) for v in values]
        got = [r for r, g in zip(result, groups, strict=True) if g == group]
        assert got == pytest.approx(expected, abs=1e-12)
    assert result[5] == 0.0


def test_without_std_only_the_mean_is_removed() -> None:
    assert normalize_group_rewards([1, 2, 6], [0, 0, 0], divide_by_std=False) == pytest.approx([-2, -1, 3])


def test_failed_samples_have_no_say_and_get_zero() -> None:
    with_failure = normalize_group_rewards([1, 0, math.nan], [0, 0, 0], excluded=[False, False, True])
    assert with_failure[:2] == normalize_group_rewards([1, 0], [0, 0])
    assert with_failure[2] == 0.0


def test_equal_rewards_give_zero() -> None:
    assert normalize_group_rewards([0.3] * 5, [0] * 5) == [0.0] * 5


def test_grpo_spreads_the_reward_over_the_response() -> None:
    advantages = grpo_advantages([0.5, -1.0], [3, 1])
    assert [a.tolist() for a in advantages] == [[0.5, 0.5, 0.5], [-1.0]]


def test_whitening_over_two_parts_equals_whitening_of_the_whole() -> None:
    values = torch.tensor([1.0, 4.0, -2.0, 8.0, 100.0], dtype=torch.float64)
    mask = torch.tensor([1, 1, 1, 1, 0])
    sums = whitening_sums(values[:2], mask[:2]) + whitening_sums(values[2:], mask[2:])
    result = whiten(values, mask, count=sums[0], total=sums[1], squares=sums[2])
    kept = [1.0, 4.0, -2.0, 8.0]
    mean, variance = statistics.mean(kept), statistics.variance(kept)
    assert result[:4].tolist() == pytest.approx([(v - mean) / math.sqrt(variance + 1e-8) for v in kept])


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
        ("low_var_kl", lambda d: min(max(math.exp(-d) - 1 + d, -10), 10)),
    ],
)
def test_kl_estimators(kind, formula) -> None:
    policy = torch.tensor([-1.0, -2.0, -0.1, -9.0], dtype=torch.float64)
    reference = torch.tensor([-1.5, -1.0, -0.1, -3.0], dtype=torch.float64)
    expected = [formula(p - r) for p, r in zip(policy.tolist(), reference.tolist(), strict=True)]
    assert approximate_kl(policy, reference, kind).tolist() == pytest.approx(expected)


def test_unknown_kl_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k9'"):
        approximate_kl(torch.zeros(1), torch.zeros(1), "k9")


@pytest.mark.parametrize("dual", [None, 3.0])
def test_clipped_loss_token_by_token(dual) -> None:
    ratios = [0.5, 0.85, 1.0, 1.1, 1.25, 1.5, 5.0]
    for advantage in (2.0, -2.0):
        log_probs = torch.tensor([math.log(r) - 1 for r in ratios], dtype=torch.float64)
        old = torch.full_like(log_probs, -1.0)
        loss, clipped = clipped_policy_loss(
            log_probs,
            old,
            torch.full_like(old, advantage),
            eps_clip=0.2,
            eps_clip_high=0.3,
            eps_clip_c=dual,
        )
        for i, ratio in enumerate(ratios):
            bounded = min(max(ratio, 0.8), 1.3)
            expected = -min(ratio * advantage, bounded * advantage)
            if dual is not None and advantage < 0:
                expected = min(expected, -dual * advantage)
            assert loss[i].item() == pytest.approx(expected)
            is_clipped = (advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.8)
            assert clipped[i].item() == float(is_clipped)


def test_gradient_is_the_policy_gradient_at_ratio_one_and_zero_where_clipped() -> None:
    log_probs = torch.tensor([-1.0, math.log(2.0) - 1], requires_grad=True)
    loss, _ = clipped_policy_loss(
        log_probs, torch.full((2,), -1.0), torch.tensor([3.0, 3.0]), eps_clip=0.2, eps_clip_high=0.2
    )
    loss.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-3.0, 0.0])


def test_per_rollout_mean_counts_a_fanned_out_rollout_once() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 50.0])
    mask = torch.tensor([1, 1, 1, 1, 0])
    # two samples (2 + 1 tokens) of rollout A with 3 unmasked tokens, one sample of rollout B with 1 unmasked token
    sums = torch.tensor([3, 3, 3, 1, 1])
    total = weighted_sum(values, per_rollout_weights(mask, sums, 2))
    assert total.item() == pytest.approx(((1 + 2 + 3) / 3 + 4 / 1) / 2)
    assert weighted_sum(values, per_token_weights(mask, 4)).item() == pytest.approx(10 / 4)


def test_masked_infinities_do_not_poison_the_sum_or_its_gradient() -> None:
    values = torch.tensor([1.0, math.inf, math.nan], requires_grad=True)
    total = weighted_sum(values, torch.tensor([0.5, 0.0, 0.0]))
    total.backward()
    assert total.item() == 0.5
    assert values.grad.tolist() == [0.5, 0.0, 0.0]


def test_fully_masked_rollout_divides_by_one_not_zero() -> None:
    weights = per_rollout_weights(torch.zeros(2), torch.zeros(2), 1)
    assert weights.tolist() == [0.0, 0.0]
