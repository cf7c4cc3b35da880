"""RMSNorm with the residual stream: one pass adds what a layer computed, keeps the sum and norms it.

Invariant: the stream is float32. In half precision its rounding, layer after layer, would be most of what separates the
log-probs of a sample from those that a trainer computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime.engine.embedded.fused.launch import early, gdc_launch_dependents, gdc_wait, power
from slime.engine.embedded.model.launching import launch


@triton.jit
def normed(x, w, eps, N: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm over the last axis of fp32 `x` [R, NP], rounded where transformers rounds; lanes behind N are zero."""
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
    tl.store(Y + at + i, normed(h, w, eps, N, Y.dtype.element_ty), mask=ok)


def add_norm(
    x: torch.Tensor | None,
    stream: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> None:
    """`stream += x`, unless there is none; `out = norm(stream)`. All `[T, N]`, the stream in float32."""
    tokens, n = stream.shape
    launch(
        _add_norm_kernel, (tokens,),
        stream if x is None else x, stream, weight, out, eps,
        N=n, NP=power(n), ADD=x is not None, num_warps=4, **early(pdl),
    )  # fmt: skip
