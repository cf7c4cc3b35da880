"""Matrix-vector products with fused norm, gate and residual sum, SwiGLU, RMSNorm, and the embedding of decode tokens.

`gemv` multiplies one or two tokens and reads each weight once. It loads a row of the weight as a whole, in two pieces
of a power of two each, so that all loads are in flight before the input is available.
Invariant: the residual stream is float32. In half precision its rounding, layer after layer, would be most of the
difference between the log-probs of a sample and those that a trainer computes.
"""

from __future__ import annotations

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

_BLOCK = 1024


@triton.jit
def silu_gate(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of fp32 values, rounded where transformers rounds."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up


@triton.jit
def _swiglu_kernel(X, Y, I: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: E741
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(X + t * 2 * I + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(X + t * 2 * I + I + i, mask=i < I, other=0.0).to(tl.float32)
    tl.store(Y + t * I + i, silu_gate(gate, up, Y.dtype.element_ty).to(Y.dtype.element_ty), mask=i < I)


def swiglu(gate_up: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    """Compute `out [T, I]` = silu(gate) * up from `gate_up [T, 2 I]`, the output of one product."""
    tokens, width = out.shape
    grid = (tokens, triton.cdiv(width, _BLOCK))
    launch(_swiglu_kernel, grid, gate_up, out, I=width, BLOCK=_BLOCK, num_warps=4, **pdl_arguments(pdl))


_WIDE, _WIDEST = 2048, 32768  # row lengths: up to which two tokens use `gemv`, and up to which any does


@triton.jit
def _load_columns(W, n, rows, k, K: tl.constexpr):
    """Load columns `k` of rows `n`, zero outside the matrix."""
    ok = (n[:, None] < rows) & (k[None, :] < K)
    return tl.load(W + n[:, None].to(tl.int64) * K + k[None, :], mask=ok, other=0.0)


@triton.jit
def _load_normed(X, k, NORM_W, scale, K: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr):
    x = tl.load(X + k, mask=k < K, other=0.0).to(tl.float32)
    if NORM:
        w = tl.load(NORM_W + k, mask=k < K, other=0.0).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
    return x


@triton.jit
def _gemv_kernel(
    X, W, BIAS, Y, NORM_W, eps, rows,
    K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = W.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    ka, kb = tl.arange(0, KA), KA + tl.arange(0, KB if KB > 0 else 1)
    second = W + rows.to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
    wa = _load_columns(W, n, rows, ka, K)
    if KB > 0:
        wb = _load_columns(W, n, rows, kb, K)
    if GATED:
        ua = _load_columns(second, n, rows, ka, K)
        if KB > 0:
            ub = _load_columns(second, n, rows, kb, K)
    if PDL:
        gdc_wait()
    for t in tl.static_range(M):
        scale = 1.0
        if NORM:
            a = tl.load(X + t * K + ka, mask=ka < K, other=0.0).to(tl.float32)
            squares = tl.sum(a * a, 0)
            if KB > 0:
                b = tl.load(X + t * K + kb, mask=kb < K, other=0.0).to(tl.float32)
                squares += tl.sum(b * b, 0)
            scale = tl.rsqrt(squares / K + eps)
        xa = _load_normed(X + t * K, ka, NORM_W, scale, K, NORM, dtype)
        y = tl.sum(wa.to(tl.float32) * xa[None, :], 1)
        if GATED:
            u = tl.sum(ua.to(tl.float32) * xa[None, :], 1)
        if KB > 0:
            xb = _load_normed(X + t * K, kb, NORM_W, scale, K, NORM, dtype)
            y += tl.sum(wb.to(tl.float32) * xb[None, :], 1)
            if GATED:
                u += tl.sum(ub.to(tl.float32) * xb[None, :], 1)
        if HAS_BIAS:
            y += tl.load(BIAS + n, mask=n < rows, other=0.0).to(tl.float32)
            if GATED:
                u += tl.load(BIAS + rows + n, mask=n < rows, other=0.0).to(tl.float32)
        if GATED:
            y = silu_gate(y, u, dtype)
        out = Y + t * rows + n
        if ADD:
            y += tl.load(out, mask=n < rows, other=0.0).to(tl.float32)
        tl.store(out, y.to(Y.dtype.element_ty), mask=n < rows)


def max_gemv_tokens(hidden: int, intermediate: int) -> int:
    """Number of tokens up to which `gemv` is faster than cuBLAS, for a model of these sizes."""
    if max(hidden, intermediate) > _WIDEST:
        return 0
    return 2 if hidden <= _WIDE else 1


def split_row(k: int) -> tuple[int, int]:
    """Split a row of `k` elements into two pieces, each a power of two; into one (and 0) where that wastes little."""
    whole = next_power_of_two(k)
    if whole == k or whole < 512:
        return whole, 0
    return whole // 2, next_power_of_two(k - whole // 2)


def choose_tile(k: int, gate: bool) -> tuple[int, int]:
    """Rows and warps of one program, the fastest on an H200; a thread holds at most 160 elements."""
    if k <= 1024:
        return (2, 1) if gate else (4, 1)
    warps = 4 if k <= 4096 else 8 if k <= 16384 else 16
    rows = 4
    while rows > 1 and rows * k * (2 if gate else 1) > 160 * 32 * warps:
        rows //= 2
    return rows, warps


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    add: bool = False,
    pdl: bool = False,
    tile: tuple[int, int] | None = None,
) -> None:
    """Compute `out [m, rows] = norm(x [m, K]) weight^T (+ bias)`; norm and bias are optional.

    gate: `weight` is gate and up concatenated, and out is silu(gate) * up. add: the result is added to `out`. `tile`:
    rows and warps of one program; None: chosen by size.
    """
    k, rows = weight.shape[1], weight.shape[0] // (2 if gate else 1)
    first, second = split_row(k)
    rows_each, warps = tile or choose_tile(k, gate)
    launch(
        _gemv_kernel, (triton.cdiv(rows, rows_each),),
        x, weight, weight if bias is None else bias, out, x if norm is None else norm, eps, rows,
        K=k, KA=first, KB=second, M=x.shape[0], BN=rows_each, NORM=norm is not None, GATED=gate,
        HAS_BIAS=bias is not None, ADD=add, num_warps=warps, **pdl_arguments(pdl),
    )  # fmt: skip


@triton.jit
def rms_norm(x, w, eps, N: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm over the last axis of fp32 `x` [R, NP], rounded where transformers rounds; lanes beyond N are zero."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    return ((x * scale[:, None]).to(dtype).to(tl.float32) * w).to(dtype)


@triton.jit
def _add_norm_kernel(X, H, W, Y, eps, N: tl.constexpr, NP: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N
    i = tl.arange(0, NP)[None, :]
    ok = i < N
    if PDL:
        gdc_launch_dependents()
    w = tl.load(W + i, mask=ok, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    h = tl.load(H + at + i, mask=ok, other=0.0)
    if ADD:
        h += tl.load(X + at + i, mask=ok, other=0.0).to(tl.float32)
        tl.store(H + at + i, h, mask=ok)
    tl.store(Y + at + i, rms_norm(h, w, eps, N, Y.dtype.element_ty), mask=ok)


def add_norm(
    x: torch.Tensor | None,
    stream: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> None:
    """Compute `stream += x` (unless x is None), then `out = norm(stream)`. All `[T, N]`, the stream in float32."""
    tokens, n = stream.shape
    launch(
        _add_norm_kernel, (tokens,),
        stream if x is None else x, stream, weight, out, eps,
        N=n, NP=next_power_of_two(n), ADD=x is not None, num_warps=4, **pdl_arguments(pdl),
    )  # fmt: skip


@triton.jit
def _begin_kernel(
    KNOWN, TOKENS, ROWS, LENS, SLOTS, TABLE, EMBED, W, H, Y, eps, st_r,
    N: tl.constexpr, NP: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    i = tl.arange(0, NP)
    if PDL:
        gdc_launch_dependents()
    w = tl.load(W + i, mask=i < N, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    row, n, token = tl.load(ROWS + b), tl.load(LENS + b), tl.load(KNOWN + b)
    tl.store(TABLE + row.to(tl.int64) * st_r + n - 1, tl.load(SLOTS + b).to(tl.int32))
    if token < 0:
        token = tl.load(TOKENS + row)
    h = tl.load(EMBED + token.to(tl.int64) * N + i, mask=i < N, other=0.0).to(tl.float32)
    tl.store(H + b * N + i, h, mask=i < N)
    if NORM:
        y = rms_norm(h[None, :], w[None, :], eps, N, Y.dtype.element_ty)
        tl.store(Y + b * N + i[None, :], y, mask=i[None, :] < N)


def embed_decode_tokens(
    known: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    embedding: torch.Tensor,
    norm: torch.Tensor,
    stream: torch.Tensor,
    out: torch.Tensor | None,
    eps: float,
    *,
    pdl: bool = False,
) -> None:
    """Start a decode step: write each new token's slot into the table and its embedding into `stream [b, N]` (float32).

    With `out`, also write the normed embedding there. The token is `known[i]`, or `tokens[row]` where that is negative:
    an earlier step wrote it there and the host has not read it yet.
    """
    n = stream.shape[1]
    launch(
        _begin_kernel, (stream.shape[0],),
        known, tokens, rows, lens, slots, table, embedding, norm, stream, stream if out is None else out,
        eps, table.stride(0), N=n, NP=next_power_of_two(n), NORM=out is not None, num_warps=4, **pdl_arguments(pdl),
    )  # fmt: skip
