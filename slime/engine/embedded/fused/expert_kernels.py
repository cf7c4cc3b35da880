"""Routing of a mixture-of-experts layer: top-k selection, sorting of pairs by expert, and the weighted sum.

The products themselves are in `model/expert_kernels`. The route kernel counts the tokens of each expert while it
selects, the layout kernel sorts the pairs of a token and an expert by these counts, and `combine` adds the products up
and resets the counts to zero for the next layer.
Invariant: the result of a token does not depend on the order of the pairs of one expert, which varies between runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slime.engine.embedded.fused.mlp_kernels import rms_norm
from slime.engine.embedded.model.triton_launch import launch, next_power_of_two

_BLOCK = 256


@triton.jit
def _route_kernel(
    LOGITS, INDEX, WEIGHTS, RANKS, COUNTS,
    E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, EP), tl.arange(0, KP)
    x = tl.load(LOGITS + t * E + e, mask=e < E, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 0))
    p = tl.where(e < E, p / tl.sum(p, 0), -1.0)
    chosen = tl.zeros((KP,), tl.float32)
    for j in tl.static_range(TOPK):
        top = tl.max(p, 0)
        best = tl.min(tl.where(p == top, e, EP), 0)
        chosen = tl.where(k == j, top, chosen)
        tl.store(INDEX + t * TOPK + j, best)
        tl.store(RANKS + t * TOPK + j, tl.atomic_add(COUNTS + best, 1))
        p = tl.where(e == best, -1.0, p)
    if NORMALISED:
        chosen = chosen / tl.sum(chosen, 0)
    tl.store(WEIGHTS + t * TOPK + k, chosen.to(WEIGHTS.dtype.element_ty), mask=k < TOPK)


@triton.jit
def _lay_out_kernel(
    INDEX, RANKS, COUNTS, ORDER, ENDS, TILE_ENDS, TILE_EXPERT, pairs, tiles,
    E: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e, i = tl.arange(0, EP), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(COUNTS + e, mask=e < E, other=0)
    ends, tile_ends = tl.cumsum(counts, 0), tl.cumsum((counts + ROWS - 1) // ROWS, 0)
    if tl.program_id(0) == 0:
        tl.store(ENDS + e, ends, mask=e < E)
        tl.store(TILE_ENDS + e, tile_ends, mask=e < E)
    expert = tl.load(INDEX + i, mask=i < pairs, other=0)
    first = tl.sum(tl.where(expert[:, None] == e[None, :], (ends - counts)[None, :], 0), 1)
    tl.store(ORDER + first + tl.load(RANKS + i, mask=i < pairs, other=0), i, mask=i < pairs)
    whose = tl.sum(((tile_ends[None, :] <= i[:, None]) & (e[None, :] < E)).to(tl.int32), 1)
    tl.store(TILE_EXPERT + i, whose, mask=i < tiles)


@triton.jit
def _combine_kernel(
    X, WEIGHTS, H, W, Y, COUNTS, eps,
    E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, NP)[None, :]
    ok = i < N
    if t == 0:
        tl.store(COUNTS + tl.arange(0, EP), tl.zeros((EP,), tl.int32), mask=tl.arange(0, EP) < E)
    total = tl.zeros((1, NP), tl.float32)
    for j in tl.static_range(TOPK):
        x = tl.load(X + (t * TOPK + j) * N + i, mask=ok, other=0.0).to(tl.float32)
        total += x * tl.load(WEIGHTS + t * TOPK + j).to(tl.float32)
    h = tl.load(H + t * N + i, mask=ok, other=0.0) + total
    tl.store(H + t * N + i, h, mask=ok)
    w = tl.load(W + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(Y + t * N + i, rms_norm(h, w, eps, N, Y.dtype.element_ty), mask=ok)


@dataclass(frozen=True)
class ExpertRouting:
    """Routing of T tokens: pairs of a token and one of its experts, sorted by expert, in tiles of one expert each."""

    index: torch.Tensor  # int32 [T, topk]
    weights: torch.Tensor  # [T, topk], in the model's dtype
    order: torch.Tensor  # int32 [T * topk], the pairs
    ends: torch.Tensor  # int32 [E], end of each expert's pairs in `order`
    tile_ends: torch.Tensor  # int32 [E], end of each expert's tiles
    tile_expert: torch.Tensor  # int32, the expert of each tile; E: unused tile
    rows: int  # pairs per tile


def route(logits: torch.Tensor, counts: torch.Tensor, topk: int, *, normalised: bool) -> ExpertRouting:
    """Route T tokens by the router's logits `[T, E]`.

    `counts [E]` must be zero before the call; `combine` resets them.
    """
    tokens, experts = logits.shape
    pairs = tokens * topk
    rows = 16 if pairs <= 16 * experts else 64
    tiles = pairs // rows + min(pairs, experts)

    def room(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    routed = ExpertRouting(
        room(tokens, topk), logits.new_empty(tokens, topk), room(pairs), room(experts), room(experts), room(tiles), rows
    )
    ranks = room(pairs)
    launch(
        _route_kernel, (tokens,), logits, routed.index, routed.weights, ranks, counts,
        E=experts, EP=next_power_of_two(experts), TOPK=topk, KP=next_power_of_two(topk),
        NORMALISED=normalised, num_warps=1,
    )  # fmt: skip
    launch(
        _lay_out_kernel, (triton.cdiv(max(pairs, tiles), _BLOCK),),
        routed.index, ranks, counts, routed.order, routed.ends, routed.tile_ends, routed.tile_expert, pairs, tiles,
        E=experts, EP=next_power_of_two(experts), ROWS=rows, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return routed


def combine(
    products: torch.Tensor,
    weights: torch.Tensor,
    stream: torch.Tensor,
    norm: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor,
    eps: float,
) -> None:
    """Add the weighted sum of `products [T * topk, N]` to `stream [T, N]` (float32); `out = norm(stream)`.

    Resets `counts` to zero.
    """
    tokens, n = stream.shape
    launch(
        _combine_kernel, (tokens,), products, weights, stream, norm, out, counts, eps,
        E=len(counts), EP=next_power_of_two(len(counts)), TOPK=weights.shape[1],
        N=n, NP=next_power_of_two(n), num_warps=4,
    )  # fmt: skip
