"""Mixture-of-experts products as a grouped Triton kernel; imported only on CUDA.

The pairs of a token and one of its experts are sorted by expert and split into tiles of one expert each; a program
multiplies one tile with some columns of that expert. The maximum number of tiles depends on the sizes alone, so the
same launch fits every routing and can be captured in a CUDA graph, in any dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def _product_kernel(
    X, W, BIAS, OUT, ORDER, ENDS, TILE_ENDS, TILE_EXPERT,
    experts, width, depth, sx, sw_e, sw_n, sw_k, so,
    TOPK: tl.constexpr, SPREADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    e = tl.load(TILE_EXPERT + tile)
    if e >= experts:
        return
    before = tl.load(TILE_ENDS + e - 1, mask=e > 0, other=0)
    begin = tl.load(ENDS + e - 1, mask=e > 0, other=0) + (tile - before) * M
    r = begin + tl.arange(0, M)
    here = r < tl.load(ENDS + e)
    pair = tl.load(ORDER + r, mask=here, other=0)
    if SPREADS:  # reads tokens, writes sorted pairs
        source = (pair // TOPK).to(tl.int64)
        target = r.to(tl.int64)
    else:  # reads sorted pairs, writes pairs in their original order
        source = r.to(tl.int64)
        target = pair.to(tl.int64)
    n = tl.program_id(1) * N + tl.arange(0, N)
    weights = W + e.to(tl.int64) * sw_e
    acc = tl.zeros((M, N), tl.float32)
    for at in range(0, depth, K):
        k = at + tl.arange(0, K)
        x = tl.load(X + source[:, None] * sx + k[None, :], mask=here[:, None] & (k[None, :] < depth), other=0.0)
        w = tl.load(
            weights + n[None, :] * sw_n + k[:, None] * sw_k, mask=(n[None, :] < width) & (k[:, None] < depth), other=0.0
        )
        acc += tl.dot(x, w, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(BIAS + e * width + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    tl.store(
        OUT + target[:, None] * so + n[None, :], acc.to(OUT.dtype.element_ty), mask=here[:, None] & (n[None, :] < width)
    )


class ExpertTiles(NamedTuple):
    """Pairs of tokens and experts, sorted by expert, in tiles of at most `rows` pairs."""

    order: torch.Tensor  # [S], the pairs
    ends: torch.Tensor  # [E], end of each expert's pairs in `order`
    tile_ends: torch.Tensor  # [E], end of each expert's tiles
    expert: torch.Tensor  # the expert of each tile; E: unused tile
    rows: int


def make_tiles(index: torch.Tensor, experts: int) -> ExpertTiles:
    flat = index.reshape(-1)
    pairs = flat.shape[0]
    rows = 16 if pairs <= 16 * experts else 64
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device).index_add_(0, flat, torch.ones_like(flat))
    tile_ends = ((counts + rows - 1) // rows).cumsum(0)
    most = pairs // rows + min(pairs, experts)
    expert = torch.searchsorted(tile_ends, torch.arange(most, device=flat.device), right=True)
    return ExpertTiles(order, counts.cumsum(0), tile_ends, expert, rows)


@torch.library.custom_op("slime::experts_product", mutates_args=())
def experts_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    ends: torch.Tensor,
    tile_ends: torch.Tensor,
    tile_expert: torch.Tensor,
    rows: int,
    topk: int,
    spreads: bool,
    transposed: bool,
) -> torch.Tensor:
    """Multiply x with each pair's expert; returns `[S, width]`.

    `weight` is `[E, width, depth]`, or `[E, depth, width]` if `transposed`.
    """
    x = x.contiguous()
    experts, depth = weight.shape[0], x.shape[1]
    width = weight.shape[2] if transposed else weight.shape[1]
    step_n, step_k = (weight.stride(2), weight.stride(1)) if transposed else (weight.stride(1), weight.stride(2))
    out = x.new_empty(order.shape[0], width)
    full = x.dtype == torch.float32
    columns = 64 if rows == 16 or full else 128
    _product_kernel[(tile_expert.shape[0], triton.cdiv(width, columns))](
        x, weight, weight if bias is None else bias, out, order, ends, tile_ends, tile_expert,
        experts, width, depth, x.stride(0), weight.stride(0), step_n, step_k, out.stride(0),
        TOPK=topk, SPREADS=spreads, M=rows, N=columns, K=32 if full else (128 if rows == 16 else 64),
        HAS_BIAS=bias is not None, PRECISION="ieee" if full else "tf32",
        num_warps=4, num_stages=2 if full else 3,
    )  # fmt: skip
    return out


@experts_product.register_fake
def _(x, weight, bias, order, ends, tile_ends, tile_expert, rows, topk, spreads, transposed):
    return x.new_empty(order.shape[0], weight.shape[2] if transposed else weight.shape[1])


def multiply_experts(
    module: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the output of a transformers experts module for `hidden [T, H]` and the experts `index [T, topk]`."""
    own: Any = module
    tiles, topk = make_tiles(index, own.num_experts), index.shape[1]

    def product(x: torch.Tensor, name: str, *, spreads: bool) -> torch.Tensor:
        bias = getattr(own, f"{name}_bias") if own.has_bias else None
        return experts_product(x, getattr(own, name), bias, *tiles, topk, spreads, own.is_transposed)

    if own.has_gate:
        inner = own._apply_gate(product(hidden, "gate_up_proj", spreads=True))
    else:
        inner = own.act_fn(product(hidden, "up_proj", spreads=True))
    out = product(inner, "down_proj", spreads=False)
    if hasattr(own, "has_post_expert_norm") and own.has_post_expert_norm:  # not in older versions of transformers
        out = own.post_expert_norm(out)
    weighted = out * weights.reshape(-1, 1)
    return weighted.view(*index.shape, -1).sum(1).to(hidden.dtype)


@torch.library.custom_op("slime::note_experts", mutates_args=("rows",))
def note_experts(rows: torch.Tensor, slots: torch.Tensor, layer: int, index: torch.Tensor) -> None:
    """Record the experts of the batch; a custom op, since torch.compile would copy all rows otherwise."""
    rows[slots, layer] = index.to(rows.dtype)


@note_experts.register_fake
def _(rows, slots, layer, index):
    return None
