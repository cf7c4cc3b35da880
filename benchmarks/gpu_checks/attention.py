"""Attention over KV slots, one query a sequence and many, against the same spelled out in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slime.engine.embedded.model import decode_kernels
from slime.engine.embedded.model.prefill_kernels import ExtendTiles

_HEADS, _KV, _SLOTS = 16, 8, 4096
_LENGTHS, _QUERIES = [700, 5, 1300], [700, 2, 67]


def checks() -> Iterator[tuple[str, float, float]]:
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for dim in (64, 128):
            for window, softcap in ((0, 0.0), (128, 0.0), (0, 30.0)):
                yield from _one(dtype, dim, window, softcap, bound)


def _one(dtype: torch.dtype, dim: int, window: int, softcap: float, bound: float) -> Iterator[tuple[str, float, float]]:
    torch.manual_seed(dim)
    device, name = (
        torch.device("cuda"),
        f"{str(dtype).removeprefix('torch.')}, dim {dim}, window {window}, cap {softcap}",
    )
    table = torch.zeros(4, 2048, dtype=torch.int32, device=device)
    order, at, rows = torch.randperm(_SLOTS - 1, device=device) + 1, 0, [2, 0, 3]
    for row, n in zip(rows, _LENGTHS, strict=True):
        table[row, :n] = order[at : at + n].int()
        at += n
    keys, values = (torch.randn(_KV, _SLOTS, dim, device=device, dtype=dtype) for _ in range(2))
    places = [table[row, :n].long() for row, n in zip(rows, _LENGTHS, strict=True)]

    def fresh(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(count, h, dim, device=device, dtype=dtype) for h in (_HEADS, _KV, _KV))  # type: ignore[return-value]

    q, k, v = fresh(sum(_QUERIES))
    slots = torch.cat([place[n - m :] for place, n, m in zip(places, _LENGTHS, _QUERIES, strict=True)])
    tiles = ExtendTiles.build(rows, _QUERIES, _LENGTHS, device)
    out = decode_kernels.paged_extend(q, k, v, slots, keys, values, table, tiles, None, dim**-0.5, softcap, window)
    want = [
        _plain(part, keys[:, p], values[:, p], window, softcap)
        for part, p in zip(q.split(_QUERIES), places, strict=True)
    ]
    yield f"extend, {name}", (out - torch.cat(want)).abs().max().item(), bound

    q, k, v = fresh(3)
    slots, lens = torch.stack([place[-1] for place in places]), torch.tensor(_LENGTHS, dtype=torch.int32, device=device)
    where = torch.tensor(rows, device=device)
    out = decode_kernels.paged_decode(
        q, k, v, slots, keys, values, table, where, lens, None, dim**-0.5, softcap, window
    )
    want = [_plain(q[i : i + 1], keys[:, p], values[:, p], window, softcap) for i, p in enumerate(places)]
    yield f"decode, {name}", (out - torch.cat(want)).abs().max().item(), bound


def _plain(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int, softcap: float) -> torch.Tensor:
    """q [m, H, D] are the last m positions of a sequence whose keys and values are [KV, n, D]."""
    m, n, group = len(q), keys.shape[1], q.shape[1] // keys.shape[0]
    keys, values = (x.float().repeat_interleave(group, 0) for x in (keys, values))
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * q.shape[2] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key, query = torch.arange(n, device=q.device), torch.arange(n - m, n, device=q.device)[:, None]
    seen = (key <= query) & ((key > query - window) if window else True)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1)
