"""Log-probs over a vocabulary sharded across processes, against log_softmax over the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime.algorithms.logprobs import VocabularyPart, linear_log_probs
from slime.train.topology import Ranks
from tests.algorithms.test_logprobs import inputs, reference
from tests.peers import together

VOCAB = 11
CASES = (
    # temperature, softcap, scale, chunk rows, with a bias
    (1.0, None, 1.0, -1, False),
    (0.7, None, 0.25, 1, True),
    (1.0, 2.5, 1.0, 3, True),
    (0.7, 2.5, 0.25, 3, False),
)


def cut(ranks: Ranks, whole: torch.Tensor, padded: int) -> torch.Tensor:
    """Return this rank's rows of a layer that is padded with a constant to a multiple of the number of ranks."""
    filler = torch.full((padded - len(whole), *whole.shape[1:]), 3.0, dtype=whole.dtype)
    return torch.cat([whole.detach(), filler]).chunk(ranks.size)[ranks.rank].clone().requires_grad_()


def parts(ranks: Ranks, dtype: torch.dtype, with_bias: bool, **sizes: int) -> tuple[Any, ...]:
    hidden, weight, bias, targets = inputs(dtype, with_bias=with_bias, **sizes)
    vocab = len(weight)
    padded = 2 * ranks.size * -(-vocab // (2 * ranks.size)) + ranks.size  # 4 ranks: the last has padding only
    own_weight = cut(ranks, weight, padded)
    own_bias = None if bias is None else cut(ranks, bias, padded)
    part = VocabularyPart(first=ranks.rank * padded // ranks.size, vocab_size=vocab, ranks=ranks)
    return (hidden, weight, bias, targets), (own_weight, own_bias, part)


def own_rows(whole: torch.Tensor, like: torch.Tensor, first: int) -> torch.Tensor:
    mine = whole[first : first + len(like)]
    return torch.cat([mine, mine.new_zeros(len(like) - len(mine), *whole.shape[1:])])


def compare_with_float64(ranks: Ranks) -> int:
    for temperature, softcap, scale, chunk_rows, with_bias in CASES:
        (hidden, weight, bias, targets), (own_weight, own_bias, part) = parts(ranks, torch.float64, with_bias)
        keywords = {"temperature": temperature, "softcap": softcap, "scale": scale}
        expected = reference(hidden, weight, bias, targets, **keywords)
        got = linear_log_probs(
            hidden, own_weight, own_bias, targets, part=part, chunk_rows=chunk_rows, with_entropy=True, **keywords
        )
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        mix = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
        mine = [leaf for leaf in (hidden, own_weight, own_bias) if leaf is not None]
        whole = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
        for weights in ((1, 0), (0, 1), (1, 1)):
            used = [place for place, on in enumerate(weights) if on]
            losses = [sum((values[i] * (mix if i else mix.flip(0))).sum() for i in used) for values in (got, expected)]
            found = torch.autograd.grad(losses[0], mine, retain_graph=True)
            wanted = torch.autograd.grad(losses[1], whole, retain_graph=True)
            torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-11)
            for one, other in zip(found[1:], wanted[1:], strict=True):
                torch.testing.assert_close(one, own_rows(other, one, part.first), rtol=0, atol=1e-11)
    return part.own_rows(own_weight)


@pytest.mark.parametrize("count", [2, 4])
def test_values_and_gradients_match_the_whole_vocabulary(count, tmp_path) -> None:
    rows = together(count, compare_with_float64, folder=tmp_path)
    assert sum(rows) == VOCAB
    assert count == 2 or rows[-1] == 0  # a rank without vocabulary rows still takes part


class LargestTensorMode(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def half_precision(ranks: Ranks) -> int:
    sizes = {"rows": 200, "width": 16, "vocab": 600}
    (hidden, weight, _, targets), (own_weight, _, part) = parts(ranks, torch.bfloat16, False, **sizes)
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    expected, _ = reference(*exact, None, targets, 1.0, None, 1.0)
    expected.sum().backward()
    with LargestTensorMode() as largest:
        log_probs, entropy = linear_log_probs(hidden, own_weight, None, targets, part=part, chunk_rows=8)
        log_probs.sum().backward()
    assert entropy is None
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-4)
    for own, wanted in ((hidden, exact[0].grad), (own_weight, own_rows(exact[1].grad, own_weight, part.first))):
        assert own.grad.dtype == torch.bfloat16
        torch.testing.assert_close(own.grad.double(), wanted, rtol=1e-2, atol=2e-2)
    return largest.elements


def test_bfloat16_is_accurate_without_materializing_all_logits(tmp_path) -> None:
    for elements in together(2, half_precision, folder=tmp_path):
        assert elements <= 16 * 604 < 200 * 300
