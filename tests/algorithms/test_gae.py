"""Returns, GAE, PPO's advantages and the value loss against loops over tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms.advantages import EstimatorInputs, discounted_returns, gae, ppo_advantages
from slime.algorithms.policy_loss import clipped_value_loss
from tests.algorithms.ragged import Ragged, leaf, ragged

DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def loop_returns(rewards, gamma: float) -> list[float]:
    found, following = [], 0.0
    for reward in reversed(list(rewards)):
        following = float(reward) + gamma * following
        found.append(following)
    return found[::-1]


def loop_gae(rewards, values, mask, gamma: float, lambd: float) -> tuple[list[float], list[float]]:
    advantages, advantage, next_value = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            advantage = float(rewards[t] + gamma * next_value - values[t]) + gamma * lambd * advantage
            advantages[t], next_value = advantage, float(values[t])
    return advantages, [a + float(v) for a, v in zip(advantages, values, strict=True)]


@given(ragged(max_length=40), DISCOUNTS)
def test_returns_match_a_loop(batch: Ragged, gamma: float) -> None:
    for rewards in batch.parts(batch.numbers(0)):
        before = rewards.clone()
        assert discounted_returns(rewards, gamma).tolist() == pytest.approx(loop_returns(rewards, gamma), abs=1e-12)
        assert torch.equal(rewards, before)


@pytest.mark.parametrize("gamma", [1.0, 0.9999, 0.99, 0.3])
def test_returns_of_a_long_sequence_match_a_loop(gamma) -> None:
    rewards = np.random.default_rng(3).normal(size=32_771)
    expected = np.array(loop_returns(rewards, gamma))
    got = discounted_returns(torch.tensor(rewards), gamma)
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-9)
    narrow = discounted_returns(torch.tensor(rewards, dtype=torch.float32), gamma)
    assert narrow.dtype == torch.float32
    np.testing.assert_allclose(narrow.numpy(), expected, rtol=0, atol=1e-3)


def test_empty_sequence_has_no_returns() -> None:
    assert discounted_returns(torch.zeros(0), 0.9).tolist() == []


@given(ragged(), DISCOUNTS, DISCOUNTS)
def test_gae_runs_over_the_unmasked_tokens(batch: Ragged, gamma: float, lambd: float) -> None:
    parts = zip(*(batch.parts(x) for x in (batch.numbers(0), batch.numbers(1), batch.mask)), strict=True)
    for rewards, values, mask in parts:
        advantages, returns = gae(rewards, values, mask, gamma=gamma, lambd=lambd)
        expected = loop_gae(rewards, values, mask, gamma, lambd)
        assert advantages.tolist() == pytest.approx(expected[0], abs=1e-12)
        assert returns.tolist() == pytest.approx(expected[1], abs=1e-12)


def test_masked_tool_tokens_do_not_change_gae() -> None:
    rewards, values = torch.tensor([0.1, 0.2, 1.0]), torch.tensor([0.5, 0.4, 0.3])
    plain = gae(rewards, values, torch.ones(3), gamma=0.9, lambd=0.8)
    padded = gae(
        torch.tensor([0.1, math.nan, 0.2, 7.0, 1.0, 9.0]),
        torch.tensor([0.5, 5.0, 0.4, -5.0, 0.3, 2.0]),
        torch.tensor([1, 0, 1, 0, 1, 0]),
        gamma=0.9,
        lambd=0.8,
    )
    assert padded[0][[0, 2, 4]].tolist() == plain[0].tolist()
    assert padded[0][[1, 3, 5]].tolist() == [0.0, 0.0, 0.0]
    assert padded[1].tolist()[1::2] == [5.0, -5.0, 2.0]


@given(ragged(), DISCOUNTS, DISCOUNTS, st.booleans(), st.booleans())
def test_ppo_charges_kl_and_adds_the_reward_at_the_last_token(
    batch: Ragged, gamma: float, lambd: float, with_kl: bool, with_turns: bool
) -> None:
    rewards = batch.numbers(0)[: len(batch.lengths)].tolist()
    values, kls, masks = (batch.parts(x) for x in (batch.numbers(1), batch.numbers(2), batch.mask))
    turns = batch.parts(batch.numbers(3) * with_turns)
    kl_or_none, turns_or_none = kls if with_kl else None, turns if with_turns else None
    advantages, returns = ppo_advantages(
        EstimatorInputs(rewards, masks, kl_or_none, values, turns_or_none, kl_coef=0.3, gamma=gamma, lambd=lambd)
    )
    assert len(advantages) == len(returns) == len(rewards)
    for i, reward in enumerate(rewards):
        mask = masks[i].tolist()
        by_token = [-0.3 * k if with_kl else 0.0 for k in kls[i].tolist()]
        by_token[max((t for t, m in enumerate(mask) if m), default=-1)] += reward
        by_token = [own + turn for own, turn in zip(by_token, turns[i].tolist(), strict=True)]
        expected = loop_gae(by_token, values[i].tolist(), mask, gamma, lambd)
        assert advantages[i].tolist() == pytest.approx(expected[0], abs=1e-12)
        assert returns[i].tolist() == pytest.approx(expected[1], abs=1e-12)
        assert advantages[i].dtype == torch.float64


def test_float32_values_with_integer_masks_stay_float32() -> None:
    kl, values = [torch.zeros(2, dtype=torch.float64)], [torch.zeros(2)]
    advantages, returns = ppo_advantages(EstimatorInputs([1.0], [torch.tensor([1, 1])], kl, values, kl_coef=1.0))
    assert (advantages[0].dtype, returns[0].dtype) == (torch.float32, torch.float32)
    assert returns[0].tolist() == [1.0, 1.0]


@given(ragged(), st.sampled_from([0.05, 0.5, 5.0]))
def test_value_loss_matches_a_token_loop(batch: Ragged, clip: float) -> None:
    values, old, returns = leaf(batch.numbers(0)), batch.numbers(1), batch.numbers(2)
    loss, clipped = clipped_value_loss(values, torch.tensor(old), torch.tensor(returns), value_clip=clip)
    loss.sum().backward()
    for t, value in enumerate(values.tolist()):
        near = min(max(value, old[t] - clip), old[t] + clip)
        free, bound = (value - returns[t]) ** 2, (near - returns[t]) ** 2
        assert loss[t].item() == pytest.approx(max(free, bound), abs=1e-12)
        assert clipped[t].item() == float(bound > free)
        slope = 0.0 if bound > free else 2 * (value - returns[t])
        assert values.grad[t].item() == pytest.approx(slope, abs=1e-12)
