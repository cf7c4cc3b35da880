"""Triton kernels of the operations between a decoder layer's matrix products, forward and backward.

Invariant: everything is computed in float32 and rounded once, when it is written; a sum over rows always has the same
order, so results are reproducible between runs. No kernel is recompiled for another number of rows: by default Triton
would recompile for a number that is not a multiple of sixteen.

The last kernels convert between the computed tokens and all tokens of a row with shared prompts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.train.samples.packing import SharedPrompts

PROGRAMS = {"norm": 12 * 132, "rotate": 16 * 132}  # largest grids of kernels that keep sums over rows


@triton.jit
def _norm_forward(x, added, weight, total, out, rstd, width, eps, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute total = x + added and out = weight * total / rms(total), one row per program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < width
    at = row * width + columns
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    if HAS_ADDED:
        value += tl.load(added + at, mask=here, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + at, value.to(total.dtype.element_ty), mask=here)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    factor = tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, (value * scale * factor).to(out.dtype.element_ty), mask=here)
    tl.store(rstd + row, scale)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(grad, x, weight, rstd, passed, dx, sums, rows, width, HAS_PASSED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute dx = passed + the gradient through the norm, and each program's part of the weight's gradient."""
    columns = tl.arange(0, BLOCK)
    here = columns < width
    factor = tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + columns
        scale = tl.load(rstd + row)
        normed = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * scale
        toward = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        total += toward * normed
        toward *= factor
        inner = tl.sum(toward * normed, axis=0) / width
        found = scale * (toward - normed * inner)
        if HAS_PASSED:
            found += tl.load(passed + at, mask=here, other=0.0).to(tl.float32)
        tl.store(dx + at, found.to(dx.dtype.element_ty), mask=here)
    tl.store(sums + tl.program_id(0) * width + columns, total, mask=here)


@triton.jit
def _rotate_forward(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    q,
    k,
    v,
    place,
    row_width,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    """Normalize and rotate each head, one token per program; with shared prompts, also copy the values."""
    token = tl.program_id(0).to(tl.int64)
    source = token
    if SHARED:
        source = tl.load(place + token).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    low_half = lanes < HALF
    cos_low = tl.load(cos + source * 2 * HALF + lanes, mask=low_half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + source * 2 * HALF + HALF + lanes, mask=low_half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + source * 2 * HALF + lanes, mask=low_half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + source * 2 * HALF + HALF + lanes, mask=low_half, other=0.0).to(tl.float32)[None, :]
    for first in tl.static_range(0, HEADS + KV_HEADS, HEADS_BLOCK):
        heads = first + tl.arange(0, HEADS_BLOCK)
        here = (heads < HEADS + KV_HEADS)[:, None] & low_half[None, :]
        at = source * row_width + heads[:, None] * 2 * HALF + lanes[None, :]
        low = tl.load(qkv + at, mask=here, other=0.0).to(tl.float32)
        high = tl.load(qkv + at + HALF, mask=here, other=0.0).to(tl.float32)
        is_query = heads < HEADS
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)[:, None]
            low *= scale * _load_norm_weights(q_weight, k_weight, is_query, lanes, low_half)
            high *= scale * _load_norm_weights(q_weight, k_weight, is_query, lanes + HALF, low_half)
        turned_low, turned_high = low * cos_low - high * sin_low, high * cos_high + low * sin_high
        to_q = token * HEADS * 2 * HALF + heads[:, None] * 2 * HALF + lanes[None, :]
        to_k = token * KV_HEADS * 2 * HALF + (heads - HEADS)[:, None] * 2 * HALF + lanes[None, :]
        tl.store(q + to_q, turned_low.to(q.dtype.element_ty), mask=here & is_query[:, None])
        tl.store(q + to_q + HALF, turned_high.to(q.dtype.element_ty), mask=here & is_query[:, None])
        tl.store(k + to_k, turned_low.to(k.dtype.element_ty), mask=here & ~is_query[:, None])
        tl.store(k + to_k + HALF, turned_high.to(k.dtype.element_ty), mask=here & ~is_query[:, None])
    if SHARED:
        for first in tl.static_range(0, KV_HEADS, HEADS_BLOCK):
            heads = first + tl.arange(0, HEADS_BLOCK)
            here = (heads < KV_HEADS)[:, None] & low_half[None, :]
            at = source * row_width + (HEADS + KV_HEADS + heads)[:, None] * 2 * HALF + lanes[None, :]
            to = token * KV_HEADS * 2 * HALF + heads[:, None] * 2 * HALF + lanes[None, :]
            tl.store(v + to, tl.load(qkv + at, mask=here, other=0.0), mask=here)
            tl.store(v + to + HALF, tl.load(qkv + at + HALF, mask=here, other=0.0), mask=here)


@triton.jit
def _load_norm_weights(q_weight, k_weight, is_query, lanes, here):
    """Load the norms' weights at these lanes: the queries' or the keys' for each head."""
    of_query = tl.load(q_weight + lanes, mask=here, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(k_weight + lanes, mask=here, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query[:, None], of_query, of_key)


@triton.jit
def _load_head_gradients(
    dq, dk, token, heads, lanes, here, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr
):
    """Load both halves of the gradients of these heads, queries and then keys, at one token of the row."""
    is_query = (heads < HEADS)[:, None]
    of_q = token * HEADS * 2 * HALF + heads[:, None] * 2 * HALF + lanes[None, :]
    of_k = token * KV_HEADS * 2 * HALF + (heads - HEADS)[:, None] * 2 * HALF + lanes[None, :]
    low = tl.load(dq + of_q, mask=here & is_query, other=0.0).to(tl.float32)
    low += tl.load(dk + of_k, mask=here & ~is_query, other=0.0).to(tl.float32)
    high = tl.load(dq + of_q + HALF, mask=here & is_query, other=0.0).to(tl.float32)
    high += tl.load(dk + of_k + HALF, mask=here & ~is_query, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _load_value_gradients(dv, token, row, head, heads, lanes, here, HALF: tl.constexpr):
    """Load both halves of the gradients of these heads' values at one token of the row."""
    at = token * row + heads[:, None] * head + lanes[None, :]
    low = tl.load(dv + at, mask=here, other=0.0).to(tl.float32)
    return low, tl.load(dv + at + HALF, mask=here, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _rotate_backward(
    dq,
    dk,
    dv,
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    dqkv,
    sums,
    copies,
    starts,
    tokens,
    row_width,
    dv_row,
    dv_head,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
):
    """Compute the gradient of the rows; programs share the tokens.

    `sums` [programs, 2 (queries, keys), 2 halves, BLOCK] are each program's parts of the norm weights' gradients.
    """
    lanes = tl.arange(0, BLOCK)
    low_half = lanes < HALF
    q_low, q_high = tl.zeros([HEADS_BLOCK, BLOCK], tl.float32), tl.zeros([HEADS_BLOCK, BLOCK], tl.float32)
    k_low, k_high = tl.zeros([HEADS_BLOCK, BLOCK], tl.float32), tl.zeros([HEADS_BLOCK, BLOCK], tl.float32)
    for at_token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(at_token, tl.int64)
        own, begin, end = token, 0, 0
        if SHARED:  # the first copy, and where the others are
            begin, end = tl.load(starts + token).to(tl.int32) + 1, tl.load(starts + token + 1).to(tl.int32)
            own = tl.load(copies + begin - 1).to(tl.int64)
        cos_low = tl.load(cos + token * 2 * HALF + lanes, mask=low_half, other=0.0).to(tl.float32)[None, :]
        cos_high = tl.load(cos + token * 2 * HALF + HALF + lanes, mask=low_half, other=0.0).to(tl.float32)[None, :]
        sin_low = tl.load(sin + token * 2 * HALF + lanes, mask=low_half, other=0.0).to(tl.float32)[None, :]
        sin_high = tl.load(sin + token * 2 * HALF + HALF + lanes, mask=low_half, other=0.0).to(tl.float32)[None, :]
        for first in tl.static_range(0, HEADS + KV_HEADS, HEADS_BLOCK):
            heads = first + tl.arange(0, HEADS_BLOCK)
            here = (heads < HEADS + KV_HEADS)[:, None] & low_half[None, :]
            is_query = heads < HEADS
            low, high = _load_head_gradients(dq, dk, own, heads, lanes, here, HEADS, KV_HEADS, HALF)
            if SHARED:
                for index in range(begin, end):
                    copy = tl.load(copies + index).to(tl.int64)
                    more_low, more_high = _load_head_gradients(dq, dk, copy, heads, lanes, here, HEADS, KV_HEADS, HALF)
                    low += more_low
                    high += more_high
            before_low, before_high = low * cos_low + high * sin_high, high * cos_high - low * sin_low
            at = token * row_width + heads[:, None] * 2 * HALF + lanes[None, :]
            if HAS_NORM:
                x_low = tl.load(qkv + at, mask=here, other=0.0).to(tl.float32)
                x_high = tl.load(qkv + at + HALF, mask=here, other=0.0).to(tl.float32)
                squares = tl.sum(x_low * x_low, axis=1) + tl.sum(x_high * x_high, axis=1)
                scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
                x_low *= scale
                x_high *= scale
                by_low, by_high = before_low * x_low, before_high * x_high
                q_low += tl.where(is_query[:, None], by_low, 0.0)
                q_high += tl.where(is_query[:, None], by_high, 0.0)
                k_low += tl.where(is_query[:, None], 0.0, by_low)
                k_high += tl.where(is_query[:, None], 0.0, by_high)
                before_low *= _load_norm_weights(q_weight, k_weight, is_query, lanes, low_half)
                before_high *= _load_norm_weights(q_weight, k_weight, is_query, lanes + HALF, low_half)
                inner = tl.sum(before_low * x_low, axis=1) + tl.sum(before_high * x_high, axis=1)
                inner = (inner / (2 * HALF))[:, None]
                before_low = scale * (before_low - x_low * inner)
                before_high = scale * (before_high - x_high * inner)
            tl.store(dqkv + at, before_low.to(dqkv.dtype.element_ty), mask=here)
            tl.store(dqkv + at + HALF, before_high.to(dqkv.dtype.element_ty), mask=here)
        for first in tl.static_range(0, KV_HEADS, HEADS_BLOCK):
            heads = first + tl.arange(0, HEADS_BLOCK)
            here = (heads < KV_HEADS)[:, None] & low_half[None, :]
            to = token * row_width + (HEADS + KV_HEADS + heads)[:, None] * 2 * HALF + lanes[None, :]
            low, high = _load_value_gradients(dv, own, dv_row, dv_head, heads, lanes, here, HALF)
            if SHARED:
                for index in range(begin, end):
                    copy = tl.load(copies + index).to(tl.int64)
                    more_low, more_high = _load_value_gradients(dv, copy, dv_row, dv_head, heads, lanes, here, HALF)
                    low += more_low
                    high += more_high
            tl.store(dqkv + to, low.to(dqkv.dtype.element_ty), mask=here)
            tl.store(dqkv + to + HALF, high.to(dqkv.dtype.element_ty), mask=here)
    if HAS_NORM:
        to = sums + tl.program_id(0) * 4 * BLOCK + lanes
        tl.store(to, tl.sum(q_low, axis=0))
        tl.store(to + BLOCK, tl.sum(q_high, axis=0))
        tl.store(to + 2 * BLOCK, tl.sum(k_low, axis=0))
        tl.store(to + 3 * BLOCK, tl.sum(k_high, axis=0))


@triton.jit
def _gate_forward(both, out, width, BLOCK: tl.constexpr):
    """Compute out = silu(gate) * up of rows [gate | up]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    gate = tl.load(both + row * 2 * width + columns, mask=here, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=here)


@triton.jit
def _gate_backward(grad, both, dboth, out, width, BLOCK: tl.constexpr):
    """Compute the gradient of [gate | up], and recompute silu(gate) * up for the weight's gradient."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    gate = tl.load(both + row * 2 * width + columns, mask=here, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + columns, mask=here, other=0.0).to(tl.float32)
    toward = tl.load(grad + row * width + columns, mask=here, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    opened = gate * share
    tl.store(out + row * width + columns, (opened * up).to(out.dtype.element_ty), mask=here)
    d_gate = toward * up * share * (1.0 + gate * (1.0 - share))
    tl.store(dboth + row * 2 * width + columns, d_gate.to(dboth.dtype.element_ty), mask=here)
    tl.store(dboth + row * 2 * width + width + columns, (toward * opened).to(dboth.dtype.element_ty), mask=here)


def norm(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x + added, its RMS norm, 1 / rms of each row); x [T, H]."""
    rows, width = x.shape
    total = x if added is None else torch.empty_like(x)
    out, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_forward[(rows,)](
        x, added, weight, total, out, rstd, width, eps, HAS_ADDED=added is not None, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip
    return total, out, rstd


def norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, passed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (gradient of x, plus `passed` if given; gradient of the weight); x is the norm's input."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    sums = torch.empty(min(PROGRAMS["norm"], rows), width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_backward[(len(sums),)](
        grad, x, weight, rstd, passed, dx, sums, rows, width, HAS_PASSED=passed is not None, BLOCK=block,
        num_warps=max(_warps(block) // 2, 1),
    )  # fmt: skip
    return dx, sums.sum(0).to(weight.dtype)


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    heads: int,
    kv_heads: int,
    shared: SharedPrompts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows [queries | keys | values] into queries [T, heads, D], keys and values [T, kv heads, D], and rotate.

    cos and sin are [t, D]. Without `shared` prompts there is a row for every token, t = T, and the values are a view of
    the rows; with them there is a row for every computed token.
    """
    dim = cos.shape[1]
    tokens = len(qkv) if shared is None else len(shared.place)
    q, k = qkv.new_empty(tokens, heads, dim), qkv.new_empty(tokens, kv_heads, dim)
    v = qkv[:, (heads + kv_heads) * dim :].unflatten(1, (kv_heads, -1)) if shared is None else torch.empty_like(k)
    _rotate_forward[(tokens,)](
        qkv, cos, sin, *(norms or (None, None)), q, k, v, None if shared is None else shared.place, qkv.shape[1], eps,
        HAS_NORM=norms is not None, SHARED=shared is not None, **_tile(heads, kv_heads, dim),
    )  # fmt: skip
    return q, k, v


def rotate_gradient(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    shared: SharedPrompts | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the gradients of the rows and of the norms' weights, from those of queries, keys and values."""
    dq, dk, dv = grads[0].contiguous(), grads[1].contiguous(), grads[2]
    assert dv.stride(2) == 1
    (heads, dim), kv_heads, tokens = dq.shape[1:], dk.shape[1], len(qkv)
    copies, starts = (None, None) if shared is None else (shared.copies, shared.starts)
    dqkv, tile = torch.empty_like(qkv), _tile(heads, kv_heads, dim)
    programs, block = min(PROGRAMS["rotate"], tokens), tile["BLOCK"]
    sums = torch.empty(programs, 2, 2, block, dtype=torch.float32, device=qkv.device)
    _rotate_backward[(programs,)](
        dq, dk, dv, qkv, cos, sin, *(norms or (None, None)), dqkv, sums, copies, starts, tokens,
        qkv.shape[1], dv.stride(0), dv.stride(1), eps, HAS_NORM=norms is not None, SHARED=shared is not None, **tile,
    )  # fmt: skip
    if norms is None:
        return dqkv, None
    found = sums.sum(0)[:, :, : dim // 2].flatten(1)
    return dqkv, (found[0].to(norms[0].dtype), found[1].to(norms[1].dtype))


def gate(both: Tensor) -> Tensor:
    """Compute silu(gate) * up of rows [gate | up]."""
    rows, width = len(both), both.shape[1] // 2
    out, block = both.new_empty(rows, width), 1024
    _gate_forward[(rows, triton.cdiv(width, block))](both, out, width, BLOCK=block)
    return out


def gate_gradient(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """Return (gradient of [gate | up], the recomputed result of `gate`)."""
    out, block = torch.empty_like(grad), 1024
    dboth, (rows, width) = torch.empty_like(both), grad.shape
    _gate_backward[(rows, triton.cdiv(width, block))](grad, both, dboth, out, width, BLOCK=block)
    return dboth, out


def _tile(heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    """Constants of the rotation kernels."""
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": dim // 2,
        "BLOCK": triton.next_power_of_2(dim // 2),
        "HEADS_BLOCK": 8,
    }


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


_BLOCK = 1024


@triton.jit
def _add_copies(grad, copies, starts, total, width, BLOCK: tl.constexpr):
    """Sum the copies of a block of one computed token per program, one after the other, in float32."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    value = tl.zeros([BLOCK], tl.float32)
    for at in range(tl.load(starts + token), tl.load(starts + token + 1)):
        copy = tl.load(copies + at).to(tl.int64)
        value += tl.load(grad + copy * width + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(total + token * width + columns, value.to(total.dtype.element_ty), mask=here)


@triton.jit
def _put_first(computed, place, first, whole, width, BLOCK: tl.constexpr):
    """Write a block of one token of the row per program: the computed token at its first copy, else zeros."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(place + token).to(tl.int64)
    is_first = tl.load(first + source) == token
    value = tl.load(computed + source * width + columns, mask=is_first & (columns < width), other=0.0)
    tl.store(whole + token * width + columns, value, mask=columns < width)


def add_copies(grad: Tensor, copies: Tensor, starts: Tensor) -> Tensor:
    """Sum copies, [T, ...] to [t, ...]: row i is the sum of the rows `copies[starts[i]:starts[i + 1]]`."""
    rows = grad.contiguous()
    total = torch.empty(len(starts) - 1, *grad.shape[1:], dtype=grad.dtype, device=grad.device)
    width, block = _pieces(total)
    _add_copies[len(total), triton.cdiv(width, block)](rows, copies, starts, total, width, BLOCK=block)
    return total


def put_first(computed: Tensor, place: Tensor, first: Tensor) -> Tensor:
    """Put rows at their first copies: [t, ...] to [T, ...].

    Row i is `computed[place[i]]` if i is `first[place[i]]`, else zeros.
    """
    whole = torch.empty(len(place), *computed.shape[1:], dtype=computed.dtype, device=computed.device)
    width, block = _pieces(whole)
    rows = computed.contiguous()
    _put_first[len(whole), triton.cdiv(width, block)](rows, place, first, whole, width, BLOCK=block)
    return whole


def _pieces(rows: Tensor) -> tuple[int, int]:
    """Width of a row, and of the block of it that one program computes."""
    width = rows[0].numel()
    return width, min(_BLOCK, triton.next_power_of_2(width))
