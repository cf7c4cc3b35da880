"""Decode attention in one kernel: normalise and rotate q and k, store k and v in the cache, attend.

Every program reads the keys of one kv head for all query heads that share it. With few sequences the context is split
into parts, depending on its length; the program that finishes last combines the parts. For prompt tokens a kernel here
does the steps before attention, and `model/prefill_kernels` attends.
Invariant: the new token's key and value are in their slot when the kernel ends, and the result does not depend on how
the context is split, beyond floating-point rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slime.engine.embedded.model.triton_launch import (
    gdc_launch_dependents,
    gdc_wait,
    launch,
    next_power_of_two,
    pdl_arguments,
)

MAX_CONTEXT_PARTS = 32  # parts of one context
MIN_PART_KEYS = 32  # keys per part
_PROGRAMS = 1024  # enough programs to keep a large GPU busy


@triton.jit
def _load(P, d, D: tl.constexpr, DP: tl.constexpr):
    """Load a head, with zeros beyond its end; without a mask where the head fills the block."""
    if D == DP:
        return tl.load(P)
    else:
        return tl.load(P, mask=d < D, other=0.0)


@triton.jit
def _store(P, x, d, D: tl.constexpr, DP: tl.constexpr):
    if D == DP:
        tl.store(P, x)
    else:
        tl.store(P, x, mask=d < D)


@triton.jit
def _norm_and_rotate(
    P, W, ok, COS, SIN, eps, D: tl.constexpr, DP: tl.constexpr, NORMED: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Load the heads at `P` [R, 1], apply RMSNorm and the rotation of one position; returns [R, DP] in `dtype`."""
    d = tl.arange(0, DP)[None, :]
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    here = ok & (d < D)
    x = tl.load(P + d, mask=here, other=0.0).to(tl.float32)
    y = tl.load(P + other, mask=here, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        w = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)
        w_other = tl.load(W + other, mask=d < D, other=0.0).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * w_other).to(dtype).to(tl.float32)
    half = tl.where(d < D // 2, d, d - D // 2)
    cos = tl.load(COS + half, mask=d < D, other=0.0).to(tl.float32)
    sin = tl.load(SIN + half, mask=d < D, other=0.0).to(tl.float32)
    return (x * cos + tl.where(d < D // 2, -y, y) * sin).to(dtype)


@triton.jit
def _keep_kernel(
    QKV, Q, K, V, SLOTS, POSITIONS, QW, KW, COS, SIN, eps, sk_h, sk_s,
    HEADS: tl.constexpr, KV: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    t, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G: tl.constexpr = HEADS // KV
    dtype: tl.constexpr = K.dtype.element_ty
    d, g = tl.arange(0, DP)[None, :], tl.arange(0, GP)[:, None]
    angle = tl.load(POSITIONS + t).to(tl.int64) * (D // 2)
    heads = QKV + t * (HEADS + 2 * KV) * D
    mine = (kv * G + g) * D
    q = _norm_and_rotate(heads + mine, QW, g < G, COS + angle, SIN + angle, eps, D, DP, NORMED, dtype)
    tl.store(Q + t * HEADS * D + mine + d, q, mask=(g < G) & (d < D))
    one = tl.zeros((1, 1), tl.int32)
    k = _norm_and_rotate(
        heads + (HEADS + kv) * D + one, KW, one == 0, COS + angle, SIN + angle, eps, D, DP, NORMED, dtype
    )
    at = kv.to(tl.int64) * sk_h + tl.load(SLOTS + t).to(tl.int64) * sk_s + d
    _store(K + at, k, d, D, DP)
    _store(V + at, _load(heads + (HEADS + KV + kv) * D + d, d, D, DP), d, D, DP)


@triton.jit
def _decode_kernel(
    QKV, K, V, O, TABLE, ROWS, LENS, QW, KW, COS, SIN, PARTS, STATS, COUNTS,
    eps, scale2, window, sk_h, sk_s, st_r,
    HEADS: tl.constexpr, KV: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, NORMED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend for one sequence, one kv head and one part of the context.

    The new token starts the running softmax of part 0, so the loop reads only keys that earlier steps stored.
    `scale2` is the softmax scale times log2(e). MOST 1: the context is not split.
    """
    b, kv, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    G: tl.constexpr = HEADS // KV
    dtype: tl.constexpr = K.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
    past = tl.load(LENS + b).to(tl.int32) - 1
    row = tl.load(ROWS + b).to(tl.int64) * st_r
    d, g = tl.arange(0, DP), tl.arange(0, GP)
    cos, sin = COS + past.to(tl.int64) * (D // 2), SIN + past.to(tl.int64) * (D // 2)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(past + 1 - window, 0)
    low, high, parts = first, past, 1
    if MOST > 1:
        size = tl.maximum(tl.cdiv(tl.cdiv(past - first, tl.num_programs(2)), N) * N, LEAST)
        parts = tl.maximum(tl.cdiv(past - first, size), 1)
        low = first + part * size
        high = tl.minimum(low + size, past)
    if PDL:
        gdc_wait()
    if MOST > 1:  # noqa: SIM102 - decided by the compiler
        if part >= parts:
            return
    heads = QKV + b.to(tl.int64) * (HEADS + 2 * KV) * D
    q = _norm_and_rotate(heads + (kv * G + g)[:, None] * D, QW, (g < G)[:, None], cos, sin, eps, D, DP, NORMED, dtype)
    m = tl.full((GP,), -1e30, tl.float32)
    l = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DP), tl.float32)
    if part == 0:
        one = tl.zeros((1, 1), tl.int32)
        k = _norm_and_rotate(heads + (HEADS + kv) * D + one, KW, one == 0, cos, sin, eps, D, DP, NORMED, dtype)
        v = _load(heads + (HEADS + KV + kv) * D + d[None, :], d[None, :], D, DP)
        at = kv * sk_h + tl.load(TABLE + row + past).to(tl.int64) * sk_s + d[None, :]
        _store(K + at, k, d[None, :], D, DP)
        _store(V + at, v, d[None, :], D, DP)
        m = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale2
        l += 1.0
        acc += v.to(tl.float32)
    for s in range(low, high, N):
        i = s + tl.arange(0, N)
        seen = i < high
        slot = tl.load(TABLE + row + tl.minimum(i, past - 1)).to(tl.int64)  # always a readable address
        at = kv * sk_h + slot[:, None] * sk_s + d[None, :]
        x = tl.dot(q, tl.trans(_load(K + at, d[None, :], D, DP)), input_precision=PRECISION) * scale2
        x = tl.where(seen[None, :], x, -float("inf"))
        top = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - top[:, None])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(dtype), _load(V + at, d[None, :], D, DP), input_precision=PRECISION)
        m = top
    out = O + (b.to(tl.int64) * HEADS + kv * G) * D
    if MOST == 1:
        tl.store(
            out + g[:, None] * D + d[None, :], (acc / l[:, None]).to(dtype), mask=(g[:, None] < G) & (d[None, :] < D)
        )
    else:
        mine = (b * KV + kv) * tl.num_programs(2) * G
        at = mine + part * G + g
        tl.store(PARTS + at[:, None] * DP + d[None, :], acc, mask=g[:, None] < G)
        tl.store(STATS + at * 2, m, mask=g < G)
        tl.store(STATS + at * 2 + 1, l, mask=g < G)
        tl.debug_barrier()  # every thread has written its share before the part is counted
        if tl.atomic_add(COUNTS + b * KV + kv, 1, sem="acq_rel") == parts - 1:
            tl.debug_barrier()
            tl.store(COUNTS + b * KV + kv, 0)
            each = tl.arange(0, MOST)
            for j in tl.static_range(G):
                there = mine + each * G + j
                ms = tl.load(STATS + there * 2, mask=each < parts, other=-1e30, cache_modifier=".cg")
                ls = tl.load(STATS + there * 2 + 1, mask=each < parts, other=0.0, cache_modifier=".cg")
                weight = tl.exp2(ms - tl.max(ms, 0))
                rows = tl.load(
                    PARTS + there[:, None] * DP + d[None, :],
                    mask=each[:, None] < parts,
                    other=0.0,
                    cache_modifier=".cg",
                )
                o = tl.sum(rows * weight[:, None], 0) / tl.sum(weight * ls, 0)
                _store(out + j * D + d, o.to(dtype), d, D, DP)


@dataclass(frozen=True)
class AttentionShape:
    """The shape of a layer's attention."""

    heads: int
    kv_heads: int
    dim: int
    eps: float

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


@dataclass(frozen=True)
class DecodeTuning:
    """Launch parameters of one program: keys per iteration, warps, pipeline stages (loads in flight)."""

    keys: int
    warps: int
    stages: int


class DecodeScratch:
    """Buffers in which the parts of a context are combined.

    Invariant: `counts` is zero before and after every step.
    """

    def __init__(self, shape: AttentionShape, most: int, positions: int, device: torch.device) -> None:
        counts = ((b, max_parts(b, shape, positions)) for b in range(1, most + 1))
        rows = shape.heads * max((parts * b for b, parts in counts if parts > 1), default=1)
        self.parts = torch.zeros(rows, max(16, next_power_of_two(shape.dim)), dtype=torch.float32, device=device)
        self.stats = torch.zeros(rows, 2, dtype=torch.float32, device=device)
        self.counts = torch.zeros(most * shape.kv_heads, dtype=torch.int32, device=device)


def max_parts(batch: int, shape: AttentionShape, positions: int) -> int:
    """Maximum number of parts for contexts of up to `positions` tokens, so that few sequences also fill a GPU."""
    wanted = min(_PROGRAMS // (batch * shape.kv_heads), positions // MIN_PART_KEYS, MAX_CONTEXT_PARTS)
    return max(1, next_power_of_two(wanted + 1) // 2)


def decode(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    angles: tuple[torch.Tensor, torch.Tensor],
    scratch: DecodeScratch,
    shape: AttentionShape,
    *,
    window: int = 0,
    parts: int = 1,
    pdl: bool = False,
    least: int = MIN_PART_KEYS,
    tuning: DecodeTuning | None = None,
) -> None:
    """Compute `out [b, heads * dim]` from `qkv [b, (heads + 2 kv_heads) * dim]`, the output of the projection.

    The cache is `[kv_heads, slots, dim]`; `table [rows, context]` has the slot of each position. `lens` include the new
    token, whose slot is in the table. Contexts are split into up to `parts` of `least` keys or more; window 0: no
    window.
    """
    batch, full = qkv.shape[0], qkv.dtype == torch.float32
    group = max(16, next_power_of_two(shape.heads // shape.kv_heads))
    if tuning is None:
        tuning = DecodeTuning(32, 4, 1) if full else DecodeTuning(32, group // 16, 3)
    cos, sin = angles
    launch(
        _decode_kernel, (batch, shape.kv_heads, parts),
        qkv, keys, values, out, table, rows, lens, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        cos, sin, scratch.parts, scratch.stats, scratch.counts,
        shape.eps, shape.scale * math.log2(math.e), window, keys.stride(0), keys.stride(1), table.stride(0),
        HEADS=shape.heads, KV=shape.kv_heads, GP=group,
        D=shape.dim, DP=max(16, next_power_of_two(shape.dim)), N=tuning.keys,
        LEAST=least, MOST=MAX_CONTEXT_PARTS if parts > 1 else 1,
        NORMED=q_norm is not None, HAS_WINDOW=window > 0, PRECISION="ieee" if full else "tf32",
        num_warps=tuning.warps, num_stages=tuning.stages, **pdl_arguments(pdl),
    )  # fmt: skip


def keep(
    qkv: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    angles: tuple[torch.Tensor, torch.Tensor],
    shape: AttentionShape,
) -> None:
    """Normalise and rotate the queries and keys of prompt tokens, and store keys and values in their slots.

    Writes `queries [T, heads, dim]`.
    """
    cos, sin = angles
    launch(
        _keep_kernel, (qkv.shape[0], shape.kv_heads),
        qkv, queries, keys, values, slots, positions,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos, sin, shape.eps,
        keys.stride(0), keys.stride(1),
        HEADS=shape.heads, KV=shape.kv_heads, GP=next_power_of_two(shape.heads // shape.kv_heads),
        D=shape.dim, DP=next_power_of_two(shape.dim), NORMED=q_norm is not None, num_warps=1,
    )  # fmt: skip
