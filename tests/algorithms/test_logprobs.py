"""`linear_log_probs` against a straightforward float64 log_softmax."""

from __future__ import annotations

import itertools

import pytest
import torch

from slime.algorithms import logprobs
from slime.algorithms.logprobs import linear_log_probs


def reference(hidden, weight, bias, targets, temperature, softcap, scale):
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


def inputs(dtype, rows=7, width=5, vocab=11, with_bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocab, width, dtype=torch.float64, generator=generator)
    bias = torch.randn(vocab, dtype=torch.float64, generator=generator) if with_bias else None
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    leaves = [t.to(dtype).requires_grad_() if t is not None else None for t in (hidden, weight, bias)]
    return *leaves, targets


CASES = list(itertools.product([1.0, 0.7], [None, 2.5], [1.0, 0.25], [1, 3, 7, 100, -1], [True, False]))


@pytest.mark.parametrize(("temperature", "softcap", "scale", "chunk_rows", "with_bias"), CASES)
def test_values_and_gradients_match_log_softmax_in_float64(temperature, softcap, scale, chunk_rows, with_bias) -> None:
    hidden, weight, bias, targets = inputs(torch.float64, with_bias=with_bias)
    keywords = {"temperature": temperature, "softcap": softcap, "scale": scale}
    log_probs, entropy = linear_log_probs(
        hidden, weight, bias, targets, chunk_rows=chunk_rows, with_entropy=True, **keywords
    )
    expected_log_probs, expected_entropy = reference(hidden, weight, bias, targets, **keywords)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-12)
    mix = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    for use_log_probs, use_entropy in ((1, 0), (0, 1), (1, 1)):
        mine = (use_log_probs * log_probs * mix).sum() if use_log_probs else 0
        wanted = (expected_log_probs * mix).sum() if use_log_probs else 0
        if use_entropy:
            mine, wanted = mine + (entropy * mix.flip(0)).sum(), wanted + (expected_entropy * mix.flip(0)).sum()
        got = torch.autograd.grad(mine, leaves, retain_graph=True)
        want = torch.autograd.grad(wanted, leaves, retain_graph=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_gradcheck_by_finite_differences() -> None:
    hidden, weight, bias, targets = inputs(torch.float64, rows=4, width=3, vocab=5)

    def function(h, w, b):
        return linear_log_probs(h, w, b, targets, temperature=0.8, softcap=3.0, chunk_rows=3, with_entropy=True)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_float32_is_close_to_float64() -> None:
    hidden, weight, bias, targets = inputs(torch.float32, rows=50, width=32, vocab=300)
    log_probs, entropy = linear_log_probs(hidden, weight, bias, targets, chunk_rows=16, with_entropy=True)
    wide = [leaf.detach().double() for leaf in (hidden, weight, bias)]
    expected = reference(*wide, targets, 1.0, None, 1.0)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=2e-5)


def test_bfloat16_parameters_give_float32_log_probs_and_bfloat16_gradients() -> None:
    hidden, weight, bias, targets = inputs(torch.bfloat16, rows=20, width=16, vocab=60)
    log_probs, _ = linear_log_probs(hidden, weight, bias, targets, chunk_rows=8)
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    expected, _ = reference(*wide, targets, 1.0, None, 1.0)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)
    log_probs.sum().backward()
    expected.sum().backward()
    for leaf, reference_leaf in zip((hidden, weight, bias), wide, strict=True):
        assert leaf.grad.dtype == torch.bfloat16
        torch.testing.assert_close(leaf.grad.double(), reference_leaf.grad, rtol=1e-2, atol=1e-2)


def test_frozen_weight_gets_no_gradient_and_hidden_still_does() -> None:
    hidden, weight, _, targets = inputs(torch.float32, with_bias=False)
    weight.requires_grad_(False)
    log_probs, entropy = linear_log_probs(hidden, weight, None, targets)
    assert entropy is None
    log_probs.sum().backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    log_probs, entropy = linear_log_probs(hidden, weight, None, torch.tensor([0, 1]), with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    torch.testing.assert_close(log_probs, torch.zeros(2))
    assert all(t.isfinite().all() for t in (entropy, hidden.grad, weight.grad))


def test_kept_gradients_depend_only_on_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory differs between ranks and reruns, and kept gradients are rounded differently."""
    monkeypatch.setattr(logprobs, "has_kernels", lambda states: True)
    for name in ("mem_get_info", "memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: pytest.fail("the device was asked for its memory"))
    hidden, weight = torch.zeros(6, 4, requires_grad=True), torch.zeros(10, 4)
    assert logprobs.keeps_gradients(hidden, weight, None, 240)
    assert not logprobs.keeps_gradients(hidden, weight, None, 239)
    assert not logprobs.keeps_gradients(hidden.detach(), weight, None, 240)
