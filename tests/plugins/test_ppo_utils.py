"""`slime.utils.ppo_utils` and `slime.utils.seqlen_balancing` compared with the formulas in plain loops."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch

from slime.errors import UserError
from slime.utils.ppo_utils import (
    calculate_log_probs_and_entropy,
    chunked_gae,
    compute_approx_kl,
    compute_cispo_loss,
    compute_entropy_from_logits,
    compute_gspo_kl,
    compute_log_probs,
    compute_opsm_mask,
    compute_policy_loss,
    get_advantages_and_returns,
    get_advantages_and_returns_batch,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
    vanilla_gae,
)
from slime.utils.seqlen_balancing import ceildiv, get_reverse_idx, get_seqlen_balanced_partitions, karmarkar_karp

NEW, OLD = [-1.0, -0.3, -2.0, -0.7], [-1.2, -0.9, -1.1, -0.7]
ADVANTAGES = [1.0, -2.0, -1.5, 0.5]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("chunk_size", [-1, 1, 2, 100])
def test_log_probs_entropy_and_gradients_match_log_softmax(generator: torch.Generator, chunk_size: int) -> None:
    logits = torch.randn(5, 9, dtype=torch.float64, generator=generator, requires_grad=True)
    tokens = torch.tensor([0, 8, 3, 3, 1])
    log_probs, entropy = calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True, chunk_size=chunk_size)
    log_p = torch.log_softmax(logits, -1)
    wanted, wanted_entropy = log_p[torch.arange(5), tokens], -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(log_probs, wanted[:, None], rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=0, atol=1e-12)
    mix = torch.linspace(-1, 2, 5, dtype=torch.float64)
    for one, two in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.3)):
        (got,) = torch.autograd.grad(
            (one * log_probs[:, 0] * mix + two * entropy * mix.flip(0)).sum(), logits, retain_graph=True
        )
        (want,) = torch.autograd.grad(
            (one * wanted * mix + two * wanted_entropy * mix.flip(0)).sum(), logits, retain_graph=True
        )
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_log_prob_and_entropy_functions_agree_and_keep_the_logits(generator: torch.Generator) -> None:
    logits = torch.randn(3, 4, generator=generator)
    given = logits.clone()
    log_probs, entropy = calculate_log_probs_and_entropy(logits, torch.tensor([1, 0, 2]), None)
    assert entropy is None
    torch.testing.assert_close(compute_log_probs(logits, torch.tensor([1, 0, 2]), None), log_probs)
    probabilities = torch.softmax(logits, -1)
    torch.testing.assert_close(
        compute_entropy_from_logits(logits, None), -(probabilities * probabilities.log()).sum(-1)
    )
    assert torch.equal(logits, given)
    nothing, none = calculate_log_probs_and_entropy(logits[:0], torch.tensor([], dtype=torch.long), None)
    assert nothing.shape == (0, 1)
    assert none is None


def test_tensor_parallel_vocabulary_is_rejected() -> None:
    class TwoRanks:
        def size(self) -> int:
            return 2

    with pytest.raises(UserError, match="tensor-parallel group of 2 ranks"):
        compute_log_probs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), TwoRanks())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
        ("low_var_kl", lambda d: min(math.exp(-d) - 1 + d, 10)),
    ],
)
def test_approx_kl_matches_the_formula(kind, value) -> None:
    found = compute_approx_kl(torch.tensor([*NEW, -9.0]), torch.tensor([*OLD, -1.0]), kind)
    differences = [a - b for a, b in zip([*NEW, -9.0], [*OLD, -1.0], strict=True)]
    assert found.tolist() == pytest.approx([value(d) for d in differences], rel=1e-5, abs=1e-6)
    weighed = compute_approx_kl(torch.tensor(NEW), torch.tensor(OLD), kind, torch.tensor([0.0, 1.0, 2.0, 0.5]))
    expected = [w * value(d) for w, d in zip((0.0, 1.0, 2.0, 0.5), differences, strict=False)]
    assert weighed.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_ppo_and_cispo_losses_match_the_formulas() -> None:
    new = torch.tensor(NEW, requires_grad=True)
    kl = torch.tensor(OLD) - new
    loss, clipped = compute_policy_loss(kl, torch.tensor(ADVANTAGES), 0.2, 0.3, 2.5)
    cispo, out = compute_cispo_loss(kl, new, torch.tensor(ADVANTAGES), 0.2, 0.3)
    for t, (lp, old, advantage) in enumerate(zip(NEW, OLD, ADVANTAGES, strict=True)):
        ratio = math.exp(lp - old)
        bounded = min(max(ratio, 0.8), 1.3)
        plain, other = -ratio * advantage, -bounded * advantage
        expected = max(plain, other)
        if advantage < 0:
            expected = min(expected, -2.5 * advantage)
        assert loss[t].item() == pytest.approx(expected, rel=1e-5)
        assert clipped[t].item() == float(other > plain)
        assert cispo[t].item() == pytest.approx(-bounded * advantage * lp, rel=1e-5)
        assert out[t].item() == float(bounded != ratio)
    (gradient,) = torch.autograd.grad(cispo.sum(), new)
    assert gradient.tolist() == pytest.approx(
        [
            -min(max(math.exp(a - b), 0.8), 1.3) * advantage
            for a, b, advantage in zip(NEW, OLD, ADVANTAGES, strict=True)
        ],
        rel=1e-5,
    )
    with pytest.raises(UserError, match="a dual clip is above 1"):
        compute_policy_loss(kl, torch.tensor(ADVANTAGES), 0.2, 0.3, 0.9)


def test_gspo_kl_and_opsm_mask_use_sequence_means() -> None:
    new, old = [torch.tensor(NEW[:3]), torch.tensor(NEW[3:])], [torch.tensor(OLD[:3]), torch.tensor([-0.1])]
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1])]
    kl = compute_gspo_kl(new, old, new, masks)
    first, second = ((-1.2 + 1.0) + (-1.1 + 2.0)) / 2, -0.1 + 0.7
    assert kl.tolist() == pytest.approx([first] * 3 + [second], rel=1e-5)
    advantages = [torch.tensor([1.0, -1.0, -1.0]), torch.tensor([1.0])]
    keep, dropped = compute_opsm_mask(Namespace(opsm_delta=0.3), new, old, advantages, masks)
    assert keep.tolist() == [1.0, 0.0, 0.0, 1.0]  # only where the advantage is negative
    assert dropped.item() == pytest.approx(2 / 2)


def plain_gae(rewards: list[float], values: list[float], gamma: float, lambd: float) -> list[float]:
    found, running = [], 0.0
    for t in reversed(range(len(rewards))):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        running = rewards[t] + gamma * after - values[t] + gamma * lambd * running
        found.append(running)
    return found[::-1]


@pytest.mark.parametrize("length", [1, 2, 7, 300])
def test_all_gae_functions_match_the_recursion(generator: torch.Generator, length: int) -> None:
    rewards = torch.randn(3, length, dtype=torch.float64, generator=generator)
    values = torch.randn(3, length, dtype=torch.float64, generator=generator)
    wanted = torch.tensor([plain_gae(r, v, 0.97, 0.9) for r, v in zip(rewards.tolist(), values.tolist(), strict=True)])
    for found in (
        vanilla_gae(rewards, values, 0.97, 0.9),
        chunked_gae(rewards, values, 0.97, 0.9, chunk_size=64),
    ):
        torch.testing.assert_close(found[0], wanted.double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(found[1], found[0] + values, rtol=0, atol=0)
    ragged = [length, max(1, length - 1)]
    advantages, returns = get_advantages_and_returns_batch(
        [n + 4 for n in ragged],
        ragged,
        [values[i, :n] for i, n in enumerate(ragged)],
        [rewards[i, :n] for i, n in enumerate(ragged)],
        0.97,
        0.9,
    )
    for i, n in enumerate(ragged):
        one, two = get_advantages_and_returns(n + 4, n, values[i, :n], rewards[i, :n], 0.97, 0.9)
        expected = plain_gae(rewards[i, :n].tolist(), values[i, :n].tolist(), 0.97, 0.9)
        assert one.tolist() == pytest.approx(expected, abs=1e-9)
        assert torch.equal(one, advantages[i])
        assert torch.equal(two, returns[i])


def test_grpo_and_reinforce_plus_plus_returns_match_the_formulas() -> None:
    kl = [torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.3])]
    masks = [torch.tensor([1, 1, 0]), torch.tensor([1])]
    rewards = torch.tensor([2.0, -1.0])
    assert [part.tolist() for part in get_grpo_returns(rewards, kl)] == [[2.0] * 3, [-1.0]]
    discounted = get_reinforce_plus_plus_returns(rewards, kl, masks, [3, 1], [5, 2], 0.5, 0.9)
    last = 2.0 - 0.5 * 0.2
    assert discounted[0].tolist() == pytest.approx([-0.05 + 0.9 * last, last, 0.0])  # at the last unmasked token
    assert discounted[1].tolist() == pytest.approx([-1.15])
    centred = get_reinforce_plus_plus_baseline_advantages(rewards, kl, masks, 0.5)
    assert centred[0][:2].tolist() == pytest.approx([1.95, 1.9])
    assert centred[1].tolist() == pytest.approx([-1.15])


def test_partitions_are_balanced_by_length() -> None:
    lengths = [9, 8, 7, 6, 5, 4]
    for found in (karmarkar_karp(lengths, 2, False), get_seqlen_balanced_partitions(lengths, 2, False)):
        assert sorted(i for part in found for i in part) == list(range(6))
        assert abs(sum(lengths[i] for i in found[0]) - sum(lengths[i] for i in found[1])) == 1
    assert [len(part) for part in get_seqlen_balanced_partitions(lengths, 3, True)] == [2, 2, 2]
    assert {sum(lengths[i] for i in part) for part in get_seqlen_balanced_partitions(lengths, 3, True)} == {13}
    with pytest.raises(UserError, match="2 sequences cannot fill 3 partitions"):
        get_seqlen_balanced_partitions([1, 2], 3, False)
    with pytest.raises(UserError, match="6 sequences cannot be parted into 4 partitions of equal size"):
        get_seqlen_balanced_partitions(lengths, 4, True)
    order = [3, 0, 2, 1]
    back = get_reverse_idx(order)
    assert [order[i] for i in back] == [0, 1, 2, 3]
    assert [ceildiv(7, 2), ceildiv(8, 2)] == [4, 4]
