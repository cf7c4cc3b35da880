"""Prefill attention over KV slots: many queries per sequence, in tiles; imported only on CUDA.

A program computes `TILE` queries of one or two heads that share their keys, so that keys and values are read once for
both. Keys that every query of the tile sees need no mask. They are most of a long context and have a separate loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from slime.engine.embedded.model.triton_launch import launch

LOG2_E = math.log2(math.e)
_PROGRAMS = 256  # enough programs to keep a large GPU busy


@triton.jit
def _attend(
    state, q, query, K, V, SLOTS, low, high, last, scale, softcap, window, sk_s, sv_s,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the running softmax `state` after keys `low` to `high`; scores are in powers of two.

    `last` is the index of a readable key. `scale` and `softcap` are multiplied by log2(e).
    """
    m, l, acc = state
    d, dv = tl.arange(0, DP)[None, :], tl.arange(0, DVP)[None, :]
    for s in range(low, high, N):
        i = s + tl.arange(0, N)
        slot = tl.load(SLOTS + tl.minimum(i, last)).to(tl.int64)[:, None]  # always a readable address
        if D == DP:
            k = tl.load(K + slot * sk_s + d)
        else:
            k = tl.load(K + slot * sk_s + d, mask=d < D, other=0.0)
        if DV == DVP:
            v = tl.load(V + slot * sv_s + dv)
        else:
            v = tl.load(V + slot * sv_s + dv, mask=dv < DV, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:
            x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
        if MASKED:
            seen = i[None, :] <= query[:, None]
            if HAS_WINDOW:
                seen = seen & (i[None, :] > query[:, None] - window)
            x = tl.where(seen, x, -float("inf"))
        top = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - top[:, None])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = top
    return m, l, acc


@triton.jit
def _extend_kernel(
    Q, K, V, O, TABLE, TILE_ROW, TILE_QUERY, TILE_COUNT, TILE_POS, SINKS,
    scale, softcap, window,
    sq_t, sq_h, sk_h, sk_s, sv_h, sv_s, so_t, so_h, st_r,
    G: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, N: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for HEADS of the G heads that share keys; rows are the queries of the first head, then of the second."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # later tiles of a prompt see more keys: they start first
    first_head = tl.program_id(1) * HEADS
    row = tl.load(TILE_ROW + tile).to(tl.int64)
    first = tl.load(TILE_QUERY + tile).to(tl.int64)
    count = tl.load(TILE_COUNT + tile)
    pos = tl.load(TILE_POS + tile)  # position of the tile's first query in its sequence
    r = tl.arange(0, TILE * HEADS)
    head, at = first_head + r // TILE, r % TILE
    kv = (first_head // G).to(tl.int64)
    d, dv, ok = tl.arange(0, DP)[None, :], tl.arange(0, DVP)[None, :], (at < count)[:, None]
    q = tl.load(Q + (first + at)[:, None] * sq_t + head[:, None] * sq_h + d, mask=ok & (d < D), other=0.0)
    if HAS_SINKS:
        m = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
        l = tl.full((TILE * HEADS,), 1.0, tl.float32)
    else:
        m = tl.full((TILE * HEADS,), -1e30, tl.float32)
        l = tl.zeros((TILE * HEADS,), tl.float32)
    state = m, l, tl.zeros((TILE * HEADS, DVP), tl.float32)
    end, query = pos + count, pos + at
    keys, values, slots = K + kv * sk_h, V + kv * sv_h, TABLE + row * st_r
    if HAS_WINDOW:
        start = tl.maximum(pos - window + 1, 0) // N * N
    else:
        start = (pos + 1) // N * N
        state = _attend(
            state, q, query, keys, values, slots, 0, start, end - 1, scale, softcap, window, sk_s, sv_s,
            D, DP, DV, DVP, N, False, HAS_CAP, False, PRECISION,
        )  # fmt: skip
    state = _attend(
        state, q, query, keys, values, slots, start, end, end - 1, scale, softcap, window, sk_s, sv_s,
        D, DP, DV, DVP, N, True, HAS_CAP, HAS_WINDOW, PRECISION,
    )  # fmt: skip
    m, l, acc = state
    o = (acc / l[:, None]).to(O.dtype.element_ty)
    tl.store(O + (first + at)[:, None] * so_t + head[:, None] * so_h + dv, o, mask=ok & (dv < DV))


@dataclass
class ExtendTiles:
    """Queries of each program of the extend kernel."""

    rows: torch.Tensor
    first_query: torch.Tensor
    count: torch.Tensor
    position: torch.Tensor

    TILE = 64

    @classmethod
    def plan(cls, rows: list[int], query_lens: list[int], key_lens: list[int]) -> np.ndarray:
        """Return the four lists `[4, tiles]`, padded with empty tiles to a multiple of four.

        Kernels are compiled for pointers at multiples of 16 bytes; another count would compile them again.
        """
        tiles, first = [], 0
        for row, m, n in zip(rows, query_lens, key_lens, strict=True):
            tiles += [(row, first + at, min(cls.TILE, m - at), n - m + at) for at in range(0, m, cls.TILE)]
            first += m
        tiles += [(0, 0, 0, 0)] * (-len(tiles) % 4)
        return np.ascontiguousarray(np.array(tiles, dtype=np.int32).T)

    @classmethod
    def build(cls, rows: list[int], query_lens: list[int], key_lens: list[int], device: torch.device) -> ExtendTiles:
        return cls(*torch.from_numpy(cls.plan(rows, query_lens, key_lens)).to(device).unbind(0))


@dataclass(frozen=True)
class ExtendTuning:
    """Launch parameters of one program: heads, keys per iteration, warps, pipeline stages (loads in flight)."""

    heads: int
    keys: int
    warps: int
    stages: int

    @classmethod
    def of(cls, q: torch.Tensor, kv_heads: int, value_dim: int, tiles: int) -> ExtendTuning:
        """Return the fastest parameters on an H200; few tiles are split into more programs to use more of the GPU."""
        if max(q.shape[2], value_dim) > 128 or q.dtype == torch.float32:
            return cls(1, 32, 4, 1)
        heads = q.shape[1]
        pairs = heads // kv_heads % 2 == 0 and tiles * heads // 2 >= _PROGRAMS
        return cls(2, 128, 8, 3) if pairs else cls(1, 128, 4, 3)


def extend_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    tiles: ExtendTiles,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    tuning: ExtendTuning | None = None,
) -> torch.Tensor:
    """Attend for q `[T, H, D]` in the order of `tiles`, whose keys and values are in their slots.

    softcap 0 and window 0: none.
    """
    heads, kv_heads, dim, value_dim = q.shape[1], keys.shape[0], q.shape[2], values.shape[2]
    out = q.new_empty(q.shape[0], heads, value_dim)
    tuning = tuning or ExtendTuning.of(q, kv_heads, value_dim, len(tiles.rows))
    launch(
        _extend_kernel, (len(tiles.rows), heads // tuning.heads),
        q, keys, values, out, table, tiles.rows, tiles.first_query, tiles.count, tiles.position,
        sinks if sinks is not None else q,
        scale * LOG2_E, softcap * LOG2_E, window,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), out.stride(1), table.stride(0),
        G=heads // kv_heads, HEADS=tuning.heads, TILE=ExtendTiles.TILE, D=dim, DP=padded_size(dim), DV=value_dim,
        DVP=padded_size(value_dim), N=tuning.keys, HAS_CAP=softcap > 0, HAS_WINDOW=window > 0,
        HAS_SINKS=sinks is not None, PRECISION=dot_precision(q.dtype), num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    return out


def padded_size(n: int) -> int:
    """Return the next size that a Triton matrix product supports: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(n))


def dot_precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
