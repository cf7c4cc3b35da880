"""Attention within packed sequences in training, values and gradients against the same in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slime.train.backends.attention import causal_attention
from slime.train.samples.packing import PackedLayout

_ROWS = {"ragged": (1, 640, 17, 300, 128, 129), "equal": (200, 200, 200), "equal at the end": (17, 130, *[200] * 16)}


def checks() -> Iterator[tuple[str, float, float]]:
    for dim in (64, 128):
        for heads, kv_heads in ((8, 8), (6, 2)):
            for name, lengths in _ROWS.items():
                yield from _one(name, lengths, heads, kv_heads, dim)


def _one(
    name: str, lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int
) -> Iterator[tuple[str, float, float]]:
    torch.manual_seed(0)
    device, tokens = torch.device("cuda"), sum(lengths)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    layout = PackedLayout(lengths=lengths, cu_seqlens=bounds, max_length=max(lengths))
    made = [torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device).bfloat16() for _ in range(2)]
    toward = made[1][:, : heads * dim].unflatten(1, (heads, dim))

    def call(dtype: torch.dtype) -> list[Tensor]:
        rows = made[0].to(dtype).requires_grad_()
        parts = rows.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        query, key, value = (part.unflatten(1, (-1, dim)) for part in parts)
        output = causal_attention(query, key, value, layout, dim**-0.5)
        return [output.detach(), *torch.autograd.grad(output, rows, toward.to(dtype))]

    what = f"{name}, {heads} heads of {dim}, {kv_heads} for keys"
    for part, found, wanted in zip(("values", "gradients"), call(torch.bfloat16), call(torch.float32), strict=True):
        yield f"{part}, {what}", ((found.float() - wanted).norm() / wanted.norm()).item(), 1e-2
