"""Triton attention over KV slots for transformers' attention interface; imported only on CUDA.

Keys and values are stored, then read through a table of slots. Sums are fp32 with a running maximum. Sliding windows,
soft caps and sinks are supported. Decode: one query token per sequence; one program computes all query heads that share
a kv head, so each key is read once. Extend: many query tokens per sequence (`extend_attention`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from slime.engine.embedded.model.attention import AttentionContext, Rules
from slime.engine.embedded.model.prefill_kernels import (
    ExtendTiles,
    dot_precision,
    extend_attention,
    padded_size,
)


@triton.jit
def _weights(x, softcap, seen, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
    return tl.where(seen, x, -float("inf"))


@triton.jit
def _decode_kernel(
    Q, K, V, O, TABLE, ROWS, LENS, SINKS,
    scale, softcap, window,
    sq_t, sq_h, sk_h, sk_s, sv_h, sv_s, so_t, so_h, st_r,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    N: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, kv = tl.program_id(0), tl.program_id(1).to(tl.int64)  # heads times slots can exceed 2^31
    n = tl.load(LENS + b)
    row = tl.load(ROWS + b).to(tl.int64)
    d, dv, g = tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, GP)
    head = kv * G + g
    q = tl.load(Q + b * sq_t + head[:, None] * sq_h + d[None, :], mask=(g[:, None] < G) & (d[None, :] < D), other=0.0)
    if HAS_SINKS:
        m = tl.load(SINKS + head, mask=g < G, other=0.0).to(tl.float32)
        l = tl.full((GP,), 1.0, tl.float32)
    else:
        m = tl.full((GP,), -1e30, tl.float32)
        l = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DVP), tl.float32)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(n - window, 0) // N * N
    for s in range(start, n, N):
        i = s + tl.arange(0, N)
        ok = i < n
        if HAS_WINDOW:
            ok = ok & (i >= n - window)
        slot = tl.load(TABLE + row * st_r + i, mask=ok, other=0).to(tl.int64)
        k = tl.load(K + kv * sk_h + slot[:, None] * sk_s + d[None, :], mask=ok[:, None] & (d[None, :] < D), other=0.0)
        v = tl.load(
            V + kv * sv_h + slot[:, None] * sv_s + dv[None, :], mask=ok[:, None] & (dv[None, :] < DV), other=0.0
        )
        x = _weights(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, ok[None, :], HAS_CAP)
        m_new = tl.maximum(m, tl.max(x, 1))
        p = tl.exp(x - m_new[:, None])
        shrink = tl.exp(m - m_new)
        l = l * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = m_new
    o = acc / l[:, None]
    tl.store(
        O + b * so_t + head[:, None] * so_h + dv[None, :],
        o.to(O.dtype.element_ty),
        mask=(g[:, None] < G) & (dv[None, :] < DV),
    )


@torch.library.custom_op("slime::paged_decode", mutates_args=("keys", "values"))
def paged_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
) -> torch.Tensor:
    """Store k, v `[T, KV, D]` at `slots`, then attend for q `[T, H, D]`; softcap 0 and window 0: none.

    The op writes the cache itself; if the cache were written outside, torch.compile would copy it at every step.
    """
    keys.index_copy_(1, slots, k.transpose(0, 1))
    values.index_copy_(1, slots, v.transpose(0, 1))
    heads, kv_heads, dim, value_dim = q.shape[1], keys.shape[0], q.shape[2], values.shape[2]
    out = q.new_empty(q.shape[0], heads, value_dim)
    group = heads // kv_heads
    _decode_kernel[(q.shape[0], kv_heads)](
        q, keys, values, out, table, rows, lens, sinks if sinks is not None else q,
        scale, softcap, window,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), out.stride(1), table.stride(0),
        G=group, GP=padded_size(group), D=dim, DP=padded_size(dim), DV=value_dim, DVP=padded_size(value_dim), N=64,
        HAS_CAP=softcap > 0, HAS_WINDOW=window > 0, HAS_SINKS=sinks is not None, PRECISION=dot_precision(q.dtype),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@paged_decode.register_fake
def _(q, k, v, slots, keys, values, table, rows, lens, sinks, scale, softcap, window):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[0], q.shape[1], values.shape[2])


def paged_extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    tiles: ExtendTiles,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
) -> torch.Tensor:
    """Store k, v and attend for many query tokens per sequence: q `[T, H, D]` in the order of `tiles`."""
    keys.index_copy_(1, slots, k.transpose(0, 1))
    values.index_copy_(1, slots, v.transpose(0, 1))
    return extend_attention(q, keys, values, table, tiles, sinks, scale, softcap, window)


Attend = Callable[..., torch.Tensor]


def attend_extend(context: AttentionContext) -> Attend:
    """Make the `attend` function of extend steps."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
        return paged_extend(
            q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1),
            context.slots, context.keys[layer], context.values[layer], context.table, context.tiles,
            rules.sinks, rules.scale, rules.softcap or 0.0, rules.window or 0,
        )  # fmt: skip

    return attend


def attend_decode(context: AttentionContext) -> Attend:
    """Make the `attend` function of decode steps."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
        return paged_decode(
            q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1),
            context.slots, context.keys[layer], context.values[layer], context.table, context.rows, context.lens,
            rules.sinks, rules.scale, rules.softcap or 0.0, rules.window or 0,
        )  # fmt: skip

    return attend
