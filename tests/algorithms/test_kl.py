"""KL estimators: values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms.policy_loss import KL_TYPES, approximate_kl
from tests.algorithms.ragged import Ragged, leaf, ragged


def k3(d: float) -> float:
    return math.exp(-d) - 1 + d


ESTIMATORS: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (k3, lambda d: 1 - math.exp(-d)),
    "low_var_kl": (lambda d: min(max(k3(d), -10), 10), lambda d: 1 - math.exp(-d) if k3(d) < 10 else 0.0),
}


@given(ragged(), st.sampled_from(KL_TYPES))
def test_values_and_gradients_match_the_estimators(batch: Ragged, kind: str) -> None:
    log_probs, reference = leaf(batch.numbers(0, 2.0)), batch.numbers(1, 2.0)
    kl = approximate_kl(log_probs, torch.tensor(reference), kind)
    kl.sum().backward()
    value, slope = ESTIMATORS[kind]
    differences = [p - r for p, r in zip(log_probs.tolist(), reference, strict=True)]
    assert kl.tolist() == pytest.approx([value(d) for d in differences], rel=1e-9, abs=1e-12)
    assert log_probs.grad.tolist() == pytest.approx([slope(d) for d in differences], rel=1e-9, abs=1e-12)


@given(ragged(), st.sampled_from(KL_TYPES))
def test_unbiased_gradient_flows_through_both_factors(batch: Ragged, kind: str) -> None:
    log_probs, reference, old = leaf(batch.numbers(0, 2.0)), batch.numbers(1, 2.0), batch.numbers(2, 2.0)
    ratios = (log_probs - torch.tensor(old)).exp()
    weighed = approximate_kl(log_probs, torch.tensor(reference), kind, ratio=ratios)
    weighed.sum().backward()
    value, slope = ESTIMATORS["k3" if kind == "low_var_kl" else kind]
    for t, log_prob in enumerate(log_probs.tolist()):
        d, ratio = log_prob - reference[t], math.exp(log_prob - old[t])
        expected, gradient = value(d) * ratio, (slope(d) + value(d)) * ratio
        if kind == "low_var_kl" and expected > 10:  # the clamp is applied last
            expected, gradient = 10.0, 0.0
        assert weighed[t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert log_probs.grad[t].item() == pytest.approx(gradient, rel=1e-9, abs=1e-12)


def test_clamp_is_applied_after_the_importance_ratio() -> None:
    """A difference of -3 has k3 = e^3 - 4 = 16.1; a ratio of 1/2 gives 8.0, a ratio of 2 gives 32.2."""
    log_probs, halved, doubled = torch.tensor([-4.0]), torch.tensor([0.5]), torch.tensor([2.0])
    for ratio, expected in ((halved, (math.exp(3) - 4) / 2), (doubled, 10.0), (None, 10.0)):
        kl = approximate_kl(log_probs, torch.tensor([-1.0]), "low_var_kl", ratio=ratio)
        assert kl.item() == pytest.approx(expected, rel=1e-6)


def test_ratio_weighted_estimate_has_the_gradient_of_the_kl() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    log_p = torch.log_softmax(logits, 0)
    (wanted,) = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), logits, retain_graph=True)
    for kind in ("k1", "k3"):
        estimate = approximate_kl(log_p, reference, kind, ratio=(log_p - log_p.detach()).exp())
        (got,) = torch.autograd.grad((log_p.detach().exp() * estimate).sum(), logits, retain_graph=True)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_extreme_differences_keep_the_gradient_finite() -> None:
    log_probs = torch.tensor([-200.0, -1.0], requires_grad=True)
    kl = approximate_kl(log_probs, torch.tensor([-1.0, -1.5]), "low_var_kl")
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([10.0, k3(0.5)], abs=1e-6)
    assert log_probs.grad.tolist() == pytest.approx([0.0, 1 - math.exp(-0.5)], abs=1e-6)


def test_rejects_an_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k9'"):
        approximate_kl(torch.zeros(1), torch.zeros(1), "k9")
