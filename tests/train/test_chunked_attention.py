"""Tests that chunked attention matches dense attention and allocates no quadratic tensor."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime.train.backends.attention import MAX_CHUNK_SCORES, Rules, chunked_attention
from slime.train.backends.fsdp import attention
from slime.train.backends.fsdp.attention import PackedContext, packed_attention
from slime.train.samples.packing import PackedLayout

KINDS = {
    "window": (5, None, False),
    "softcap": (None, 3.0, False),
    "sinks": (None, None, True),
    "all": (7, 3.0, True),
    "window of one": (1, None, True),
}


def attention_inputs(n: int, heads: int, kv_heads: int, length: int, dtype=torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(n, heads, length, 8), (n, kv_heads, length, 8), (n, kv_heads, length, 6), (heads,)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def dense_attention(query, key, value, sinks, rules: Rules) -> torch.Tensor:
    """Attention by its definition, with the full score matrix."""
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).transpose(2, 3) * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    at = torch.arange(query.shape[2])
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < (rules.window or len(at)))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(scores, -1)[..., : len(at)] @ value.repeat_interleave(repeats, 1)


@pytest.mark.parametrize("cells", [1, 150, 10_000])
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_attention_matches_dense_attention(kind, cells) -> None:
    window, softcap, has_sinks = KINDS[kind]
    rules = Rules(scale=0.7, window=window, softcap=softcap, cells=cells)
    inputs = attention_inputs(2, 4, 2, 13)
    query, key, value, sinks = inputs
    arguments = (query, key, value, sinks if has_sinks else None, rules)
    got, expected = chunked_attention(*arguments), dense_attention(*arguments)
    torch.testing.assert_close(got, expected)
    wanted = inputs if has_sinks else inputs[:3]
    upstream = torch.randn_like(got)
    for one, other in zip(
        torch.autograd.grad(got, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        torch.testing.assert_close(one, other)


class LargestTensor(TorchDispatchMode):
    """Records the element count of the largest tensor that an operation creates."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_quadratic_in_sequence_length(kind, monkeypatch) -> None:
    monkeypatch.setitem(MAX_CHUNK_SCORES, "cpu", 1 << 15)
    window, softcap, has_sinks = KINDS[kind]
    length, heads = 1024, 4
    query, key, value, sinks = attention_inputs(1, heads, 2, length, torch.float32)
    context = PackedContext()
    context.begin(PackedLayout((length,), torch.tensor([0, length]), length))
    module = torch.nn.Module()
    object.__setattr__(module, attention.CONTEXT_ATTRIBUTE, context)
    aux = sinks if has_sinks else None
    with LargestTensor() as largest:
        out, _ = packed_attention(module, query, key, value, None, sliding_window=window, softcap=softcap, s_aux=aux)
        out.sum().backward()
    assert largest.elements <= max(1 << 15, length * heads * 8)
