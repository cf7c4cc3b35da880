"""The beginning of a decode step: which token each sequence goes on from, where it is kept, and what it looks like."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime.engine.embedded.fused.launch import early, gdc_launch_dependents, gdc_wait, power
from slime.engine.embedded.fused.norm import normed
from slime.engine.embedded.model.launching import launch


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
        y = normed(h[None, :], w[None, :], eps, N, Y.dtype.element_ty)
        tl.store(Y + b * N + i[None, :], y, mask=i[None, :] < N)


def begin(
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
    """Each new token's slot into the table, its embedding into `stream [b, N]`, float32, and, normed, into `out`.

    The token is `known[i]`, or `tokens[row]` where that is negative: a step before left it there, and nobody read it.
    """
    n = stream.shape[1]
    launch(
        _begin_kernel, (stream.shape[0],),
        known, tokens, rows, lens, slots, table, embedding, norm, stream, stream if out is None else out,
        eps, table.stride(0), N=n, NP=power(n), NORM=out is not None, num_warps=4, **early(pdl),
    )  # fmt: skip
