"""The gated delta rule over packed sequences equals the recurrence over each sequence alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from slime.algorithms.delta_rule import Chunks, causal_conv, gated_delta_rule

LENGTHS = (3, 64, 150, 1, 65, 128, 20)
TOKENS = sum(LENGTHS)


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Reference: token-by-token recurrence over one sequence."""
    repeats = value.shape[1] // key.shape[1]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    q, k = q.repeat_interleave(repeats, 1) * q.shape[-1] ** -0.5, k.repeat_interleave(repeats, 1)
    state = value.new_zeros(value.shape[1], k.shape[-1], value.shape[-1])
    outputs = []
    for t in range(len(value)):
        state = state * decay[t].exp()[:, None, None]
        error = value[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], error * beta[t][:, None])
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs)


def states() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, 2, 8), (TOKENS, 2, 8), (TOKENS, 4, 6), (TOKENS, 4), (TOKENS, 4)]
    q, k, v, decay, beta = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [q, k, v, -torch.nn.functional.softplus(decay), beta.sigmoid()]


def test_outputs_and_gradients_match_each_sequence_alone() -> None:
    exact, packed = ([x.requires_grad_() for x in states()] for _ in range(2))
    alone = torch.cat([recurrence(*parts) for parts in zip(*(x.split(LENGTHS) for x in exact), strict=True)])
    got = gated_delta_rule(*(x.float() for x in packed), Chunks.of(LENGTHS, torch.device("cpu")))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), alone, rtol=0, atol=2e-6)
    weights = torch.linspace(-1, 1, alone.numel(), dtype=torch.float64).reshape(alone.shape)
    (alone * weights).sum().backward()
    (got * weights).sum().backward()
    for one, other in zip(packed, exact, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=2e-6)


def test_each_token_has_one_slot_and_padding_has_none() -> None:
    chunks = Chunks.of(LENGTHS, torch.device("cpu"))
    assert chunks.alive == (7, 3, 1)
    assert chunks.token[chunks.place].tolist() == list(range(TOKENS))
    assert (chunks.token == TOKENS).sum() == len(chunks.token) - TOKENS
    assert chunks.position.tolist() == [position for length in LENGTHS for position in range(length)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_does_not_cross_sequences(dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    row, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in [(TOKENS, 5), (5, 4), (5,)])
    got = causal_conv(row, weight, bias, Chunks.of(LENGTHS, torch.device("cpu")).position)
    assert got.dtype == dtype
    alone = [
        conv1d(part.T[None].float(), weight[:, None].float(), bias.float(), padding=3, groups=5)[0, :, : len(part)].T
        for part in row.split(LENGTHS)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(got.float(), torch.cat(alone), rtol=0, atol=tolerance)
