"""Products of a weight with one or two tokens: each weight is read once, with the norm, the gate or the sum around it.

A row of the weight is read whole, in two pieces of a power of two each, so that all of it is under way before the
first number of the input is there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime.engine.embedded.fused.launch import early, gdc_launch_dependents, gdc_wait, power
from slime.engine.embedded.fused.swiglu import gated
from slime.engine.embedded.model.launching import launch

_WIDE, _WIDEST = 2048, 32768  # numbers in a row


@triton.jit
def _piece(W, n, rows, k, K: tl.constexpr):
    """Numbers `k` of the rows `n`."""
    ok = (n[:, None] < rows) & (k[None, :] < K)
    return tl.load(W + n[:, None].to(tl.int64) * K + k[None, :], mask=ok, other=0.0)


@triton.jit
def _scaled(X, k, NORM_W, scale, K: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr):
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
    wa = _piece(W, n, rows, ka, K)
    if KB > 0:
        wb = _piece(W, n, rows, kb, K)
    if GATED:
        ua = _piece(second, n, rows, ka, K)
        if KB > 0:
            ub = _piece(second, n, rows, kb, K)
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
        xa = _scaled(X + t * K, ka, NORM_W, scale, K, NORM, dtype)
        y = tl.sum(wa.to(tl.float32) * xa[None, :], 1)
        if GATED:
            u = tl.sum(ua.to(tl.float32) * xa[None, :], 1)
        if KB > 0:
            xb = _scaled(X + t * K, kb, NORM_W, scale, K, NORM, dtype)
            y += tl.sum(wb.to(tl.float32) * xb[None, :], 1)
            if GATED:
                u += tl.sum(ub.to(tl.float32) * xb[None, :], 1)
        if HAS_BIAS:
            y += tl.load(BIAS + n, mask=n < rows, other=0.0).to(tl.float32)
            if GATED:
                u += tl.load(BIAS + rows + n, mask=n < rows, other=0.0).to(tl.float32)
        if GATED:
            y = gated(y, u, dtype)
        out = Y + t * rows + n
        if ADD:
            y += tl.load(out, mask=n < rows, other=0.0).to(tl.float32)
        tl.store(out, y.to(Y.dtype.element_ty), mask=n < rows)


def most_tokens(hidden: int, intermediate: int) -> int:
    """Up to how many tokens this is faster than cuBLAS, for a model of these sizes."""
    if max(hidden, intermediate) > _WIDEST:
        return 0
    return 2 if hidden <= _WIDE else 1


def pieces(k: int) -> tuple[int, int]:
    """A row of `k` numbers as two pieces, powers of two; one where that wastes little."""
    whole = power(k)
    if whole == k or whole < 512:
        return whole, 0
    return whole // 2, power(k - whole // 2)


def tile_for(k: int, gate: bool) -> tuple[int, int]:
    """Rows of one program and its warps, by what was fastest on an H200; no thread holds more than 160 numbers."""
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
    """`out [m, rows] = norm(x [m, K]) weight^T (+ bias)`, each part where asked for.

    gate: `weight` has gate and up one behind the other, out is silu(gate) * up. add: `out` is added to. `tile`: rows of
    a program and its warps, which are found if not given.
    """
    k, rows = weight.shape[1], weight.shape[0] // (2 if gate else 1)
    first, second = pieces(k)
    rows_each, warps = tile or tile_for(k, gate)
    launch(
        _gemv_kernel, (triton.cdiv(rows, rows_each),),
        x, weight, weight if bias is None else bias, out, x if norm is None else norm, eps, rows,
        K=k, KA=first, KB=second, M=x.shape[0], BN=rows_each, NORM=norm is not None, GATED=gate,
        HAS_BIAS=bias is not None, ADD=add, num_warps=warps, **early(pdl),
    )  # fmt: skip
