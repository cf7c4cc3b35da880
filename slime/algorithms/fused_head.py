"""Softmax statistics of an output layer whose logits are never written (Triton, on Hopper).

Invariant: the numbers are those of `head_kernels.softmax_stats` on hidden @ weight.T but for the order of float32 sums.
Every tile of the product is reduced to two or three numbers a row while the next is computed, which saves writing and
reading four bytes for each logit: a third of the time that both take at a vocabulary of 152k and 1,024 hidden.

    log2 sum_j 2^z_j = log2 sum_tiles 2^(part);    sum_j p_j z_j = sum_tiles 2^(part - whole) * mean

with z in units of log 2, `part` a tile's log2 of its sum of powers, and `mean` the mean of its z under them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slime.algorithms.head_kernels import factors, transformed
from slime.algorithms.logit_transform import LogitTransform

ROWS, COLUMNS, DEPTH = 128, 128, 64  # of a tile; two of them run on a multiprocessor, and one computes meanwhile
GROUP = 16  # tiles of rows that go over the vocabulary together, so that a piece of the weight is read once for all
WARPS, STAGES = 4, 3
JOINED_TILES, JOINED_ROWS = 64, 32  # of a program that joins them
_LOG2 = math.log(2.0)


@triton.jit(do_not_specialize=["rows"])
def _tile_stats(
    hidden,
    weight,
    bias,
    targets,
    parts,
    means,
    picked,
    rows,
    vocab,
    width,
    factor,
    cap_in,
    cap_out,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of the logits a program; `hidden` and `weight` are descriptors, behind whose ends are zeros."""
    row_tiles = tl.cdiv(rows, ROWS)
    in_group = GROUP * tl.cdiv(vocab, COLUMNS)
    first = tl.program_id(0) // in_group * GROUP
    group = tl.minimum(row_tiles - first, GROUP)
    row_tile = first + tl.program_id(0) % in_group % group
    tile = tl.program_id(0) % in_group // group
    raw = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, tl.cdiv(width, DEPTH)):
        piece = weight.load([tile * COLUMNS, at * DEPTH])
        raw = tl.dot(hidden.load([row_tile * ROWS, at * DEPTH]), piece.T, raw)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, COLUMNS)[None, :]
    columns = tile * COLUMNS + lanes
    z = transformed(raw, bias, columns, columns < vocab, factor, cap_in, cap_out, HAS_BIAS, HAS_CAP)
    if not IS_EVEN:
        z = tl.where(columns < vocab, z, -1e30)
    top = tl.max(z, axis=1)
    powers = tl.exp2(z - top[:, None])
    total = tl.sum(powers, axis=1)
    at = tile.to(tl.int64) * rows + row
    tl.store(parts + at, top + tl.log2(total), mask=row < rows)
    if WITH_ENTROPY:
        tl.store(means + at, tl.sum(powers * z, axis=1) / total, mask=row < rows)
    target = tl.load(targets + row, mask=row < rows, other=-1) - tile * COLUMNS
    is_here = (target >= 0) & (target < COLUMNS)
    if tl.max(is_here.to(tl.int32), axis=0) > 0:
        tl.store(picked + row, tl.sum(tl.where(target[:, None] == lanes, z, 0.0), axis=1), mask=is_here)


@triton.jit(do_not_specialize=["rows"])
def _join_tiles(
    parts, means, whole, entropy, rows, tiles, WITH_ENTROPY: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr
):
    """Some rows a program: running maximum, sum of powers and of powers times means, over all tiles."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)[:, None]
        here = (tile < tiles) & (row[None, :] < rows)
        at = tile.to(tl.int64) * rows + row[None, :]
        part = tl.load(parts + at, mask=here, other=-1e30)
        higher = tl.maximum(top, tl.max(part, axis=0))
        shrink = tl.exp2(top - higher)
        powers = tl.where(here, tl.exp2(part - higher[None, :]), 0.0)
        total = total * shrink + tl.sum(powers, axis=0)
        if WITH_ENTROPY:
            mean = tl.load(means + at, mask=here, other=0.0)
            weighted = weighted * shrink + tl.sum(powers * mean, axis=0)
        top = higher
    log_total = top + tl.log2(total)
    tl.store(whole + row, log_total, mask=row < rows)
    if WITH_ENTROPY:
        tl.store(entropy + row, log_total - weighted / total, mask=row < rows)


def projected_stats(
    hidden: Tensor,  # [R, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of each row [R]: the log-normaliser, the logit of its target (0 where that is -1), the entropy when asked for."""
    states = hidden.to(weight.dtype).contiguous()
    (rows, width), vocab = states.shape, len(weight)
    tiles = triton.cdiv(vocab, COLUMNS)
    factor, cap_in, cap_out = factors(transform)
    scale = 1.0 / _LOG2
    parts = torch.empty(tiles, rows, dtype=torch.float32, device=weight.device)
    means = torch.empty_like(parts) if with_entropy else None
    picked = parts.new_zeros(rows)
    _tile_stats[(triton.cdiv(rows, ROWS) * tiles,)](
        TensorDescriptor.from_tensor(states, [ROWS, DEPTH]),
        TensorDescriptor.from_tensor(weight, [COLUMNS, DEPTH]),
        bias, targets, parts, means, picked, rows, vocab, width, factor * scale, cap_in, cap_out * scale,
        HAS_BIAS=bias is not None, HAS_CAP=transform.softcap is not None, WITH_ENTROPY=with_entropy,
        IS_EVEN=vocab % COLUMNS == 0, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, GROUP=GROUP,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    whole = torch.empty_like(picked)
    entropy = torch.empty_like(picked) if with_entropy else None
    _join_tiles[(triton.cdiv(rows, JOINED_ROWS),)](
        parts, means, whole, entropy, rows, tiles, WITH_ENTROPY=with_entropy, TILES=JOINED_TILES, ROWS=JOINED_ROWS
    )
    return whole.mul_(_LOG2), picked.mul_(_LOG2), None if entropy is None else entropy.mul_(_LOG2)
