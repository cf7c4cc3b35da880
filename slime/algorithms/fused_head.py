"""Triton kernels of the output layer: softmax statistics and gradients of logits, and statistics without logits.

`softmax_stats` and `logits_gradient` read a chunk of raw float32 logits in one pass each, with
    u = scale * (raw + bias);  v = softcap * tanh(u / softcap);  z = v / temperature
Invariant: they compute in float32, and the only output of the chunk's size is the gradient, in the dtype of the matrix
products that follow.

`projected_stats` (on Hopper) computes the statistics of an output layer whose logits are never written. Invariant: its
numbers are those of `softmax_stats` on hidden @ weight.T, except for the order of float32 sums. Every tile of the
product is reduced to two or three numbers per row while the next one is computed, which saves writing and reading four
bytes for each logit: a third of the time of both at a vocabulary of 152k and 1,024 hidden.

    log2 sum_j 2^z_j = log2 sum_tiles 2^(part);    sum_j p_j z_j = sum_tiles 2^(part - whole) * mean

with z in units of log 2, `part` a tile's log2 of its sum of powers, and `mean` the mean of its z weighted by them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slime.algorithms.logit_transform import LogitTransform

STATS_BLOCK, STATS_WARPS = 2048, 4
GRADIENT_BLOCK, GRADIENT_WARPS = 2048, 4


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def transformed(raw, bias, columns, here, factor, cap_in, cap_out, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Compute z from raw logits; `factor` is scale / temperature, or with a cap `cap_in` is scale / softcap and
    `cap_out` softcap / temperature."""
    if HAS_BIAS:
        raw += tl.load(bias + columns, mask=here, other=0.0).to(tl.float32)
    if HAS_CAP:
        return _tanh(raw * cap_in) * cap_out
    return raw * factor


@triton.jit
def _stats(
    raw,
    bias,
    targets,
    normaliser,
    picked,
    entropy,
    vocab,
    row_stride,
    factor,
    cap_in,
    cap_out,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce one row per program: each lane has a running maximum, sum of exponentials, and sum of exponentials times
    logits."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        here = columns < vocab
        z = tl.load(raw + row * row_stride + columns, mask=here, other=0.0)
        z = transformed(z, bias, columns, here, factor, cap_in, cap_out, HAS_BIAS, HAS_CAP)
        higher = tl.maximum(top, tl.where(here, z, -1e30))
        shrink = tl.exp(top - higher)
        part = tl.where(here, tl.exp(z - higher), 0.0)
        total = total * shrink + part
        if WITH_ENTROPY:
            weighted = weighted * shrink + part * z
        top = higher
    highest = tl.max(top, axis=0)
    shrink = tl.exp(top - highest)
    whole = tl.sum(total * shrink, axis=0)
    log_total = tl.log(whole) + highest
    tl.store(normaliser + row, log_total)
    if WITH_ENTROPY:
        tl.store(entropy + row, log_total - tl.sum(weighted * shrink, axis=0) / whole)
    target = tl.load(targets + row)
    here = target >= 0
    z = tl.load(raw + row * row_stride + target, mask=here, other=0.0)
    z = transformed(z, bias, target, here, factor, cap_in, cap_out, HAS_BIAS, HAS_CAP)
    tl.store(picked + row, tl.where(here, z, 0.0))


@triton.jit
def _gradient(
    raw,
    bias,
    targets,
    normaliser,
    entropy,
    grad_log_probs,
    grad_entropy,
    out,
    vocab,
    row_stride,
    factor,
    cap_in,
    cap_out,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of one block of a row per program; a row without a target among the columns has -1."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < vocab
    z = tl.load(raw + row * row_stride + columns, mask=here, other=0.0)
    z = transformed(z, bias, columns, here, factor, cap_in, cap_out, HAS_BIAS, HAS_CAP)
    upstream = tl.load(grad_log_probs + row)
    log_p = z - tl.load(normaliser + row)
    weight = upstream
    if WITH_ENTROPY:
        weight += tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    found = tl.where(columns == tl.load(targets + row), upstream, 0.0) - tl.exp(log_p) * weight
    if HAS_CAP:
        ratio = z / cap_out
        found *= (1.0 - ratio * ratio) * factor
    else:
        found *= factor
    tl.store(out + row * vocab + columns, found.to(out.dtype.element_ty), mask=here)


def softmax_stats(
    raw: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute for each row [R] the log-normaliser, the target's logit (0 for the target -1), optionally the entropy."""
    rows, vocab = raw.shape
    normaliser, picked = (torch.empty(rows, dtype=torch.float32, device=raw.device) for _ in range(2))
    entropy = torch.empty_like(normaliser) if with_entropy else None
    _stats[(rows,)](
        raw,
        bias,
        targets,
        normaliser,
        picked,
        entropy,
        vocab,
        raw.stride(0),
        *factors(transform),
        HAS_BIAS=bias is not None,
        HAS_CAP=transform.softcap is not None,
        WITH_ENTROPY=with_entropy,
        BLOCK=STATS_BLOCK,
        num_warps=STATS_WARPS,
    )
    return normaliser, picked, entropy


def logits_gradient(
    raw: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    normaliser: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: tuple[Tensor, Tensor] | None,
    transform: LogitTransform,
    *,
    out: Tensor,
) -> None:
    """Write dL/d(raw projection) [R, V] to `out`; `grad_entropy` is the gradient of the entropy, and the entropy."""
    assert out.is_contiguous()
    rows, vocab = raw.shape
    upstream = torch.zeros_like(normaliser) if grad_log_probs is None else grad_log_probs.contiguous()
    toward_entropy, entropy = (None, None) if grad_entropy is None else (part.contiguous() for part in grad_entropy)
    _gradient[(rows, triton.cdiv(vocab, GRADIENT_BLOCK))](
        raw,
        bias,
        targets,
        normaliser,
        entropy,
        upstream,
        toward_entropy,
        out,
        vocab,
        raw.stride(0),
        *factors(transform),
        HAS_BIAS=bias is not None,
        HAS_CAP=transform.softcap is not None,
        WITH_ENTROPY=grad_entropy is not None,
        BLOCK=GRADIENT_BLOCK,
        num_warps=GRADIENT_WARPS,
    )


def factors(transform: LogitTransform) -> tuple[float, float, float]:
    """Return the factors of `transformed`: without a cap, before the cap, after the cap."""
    factor = transform.scale / transform.temperature
    if transform.softcap is None:
        return factor, 1.0, 1.0
    return factor, transform.scale / transform.softcap, transform.softcap / transform.temperature


ROWS, COLUMNS, DEPTH = 128, 128, 64  # of a tile; two tiles run on a multiprocessor, so that one always computes
GROUP = 16  # tiles of rows that go over the vocabulary together, so that a piece of the weight is read once for all
WARPS, STAGES = 4, 3
JOINED_TILES, JOINED_ROWS = 64, 32  # of a program of `_join_tiles`
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
    """Reduce one tile of the logits per program; `hidden` and `weight` are descriptors with zeros out of bounds."""
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
    """Join the tiles of some rows per program: running maximum, sum of powers, and sum of powers times means."""
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
    """Compute for each row [R] the log-normaliser, the target's logit (0 for the target -1), optionally the entropy."""
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
