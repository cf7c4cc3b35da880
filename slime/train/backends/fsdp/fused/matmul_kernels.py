"""Triton kernels for matrix products: fused gate and up products, and products in 8-bit floats (e4m3).

`product` computes silu(x @ gate.T) * (x @ up.T) in one kernel, on Hopper, for passes without a backward. Invariant:
both products are rounded as if they had been written, so the result is that of `kernels.gate` on the products. Neither
is written: at hidden size 1,024 reading and writing them takes a quarter of the products' time, and this one kernel is
an eighth faster than the two. The larger the hidden size, the less that matters, and torch's products have the faster
inner loop: they are faster from hidden size 2,560 on.

`fp8_product` has a scale for each row of both factors:

    s_i = max_k |x_ik| / 448;  q = e4m3(x / s);  x @ w.T ~ (q_x @ q_w.T) * s_x * s_w.T

Invariant: the scales are computed from the present values, so nothing overflows and no state is kept between calls. A
row of zeros stays zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, COLUMNS, DEPTH = 128, 64, 64  # of a tile, which has `COLUMNS` columns each of gate and of up
GROUP = 16  # tiles of rows that are computed together over all columns
WARPS, STAGES = 4, 3
MOST_WIDTH = 2048
_ALIGNMENT = 16  # bytes, that the copy engine requires of rows
_HOPPER = 9


@triton.jit(do_not_specialize=["rows"])
def _gated_tile(
    x,
    joined,
    out,
    rows,
    inner,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute one tile per program; of the tensors' descriptors, reads past the end are zeros, writes are dropped."""
    row_tiles = tl.cdiv(rows, ROWS)
    in_group = GROUP * tl.cdiv(inner, COLUMNS)
    first = tl.program_id(0) // in_group * GROUP
    group = tl.minimum(row_tiles - first, GROUP)
    row_tile = first + tl.program_id(0) % in_group % group
    tile = tl.program_id(0) % in_group // group
    both = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
    for at in range(0, tl.cdiv(width, DEPTH)):
        piece = joined.load([tile * 2 * COLUMNS, at * DEPTH])
        both = tl.dot(x.load([row_tile * ROWS, at * DEPTH]), piece.T, both)
    gate, up = tl.split(both.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1))
    gate = gate.to(out.dtype).to(tl.float32)
    up = up.to(out.dtype).to(tl.float32)
    out.store([row_tile * ROWS, tile * COLUMNS], (gate * tl.sigmoid(gate) * up).to(out.dtype))


def takes(rows: Tensor, gate: Tensor) -> bool:
    """Return True if `product` runs on these tensors and is faster, as measured on Hopper."""
    if not rows.is_cuda or rows.dtype not in (torch.bfloat16, torch.float16) or not len(rows):
        return False
    if torch.cuda.get_device_capability(rows.device)[0] != _HOPPER or len(gate) % COLUMNS:
        return False
    width = rows.shape[1]
    return width <= MOST_WIDTH and width * rows.element_size() % _ALIGNMENT == 0


def product(rows: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(rows @ gate.T) * (rows @ up.T), [R, H] to [R, I].

    gate and up are [I, H], and I is a multiple of `COLUMNS`.
    """
    (count, width), inner = rows.shape, len(gate)
    joined = torch.stack([weight.view(-1, COLUMNS, width) for weight in (gate, up)], dim=1).view(2 * inner, width)
    out = rows.new_empty(count, inner)
    _gated_tile[(triton.cdiv(count, ROWS) * (inner // COLUMNS),)](
        TensorDescriptor.from_tensor(rows, [ROWS, DEPTH]),
        TensorDescriptor.from_tensor(joined, [2 * COLUMNS, DEPTH]),
        TensorDescriptor.from_tensor(out, [ROWS, COLUMNS]),
        count, inner, width, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, GROUP=GROUP, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


LARGEST = 448.0
"""Largest finite value of e4m3."""


@triton.jit
def _quantize(x, out, scales, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize one row per program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < width
    value = tl.load(x + row * width + columns, mask=here, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-30) / LARGEST
    tl.store(out + row * width + columns, (value / scale).to(out.dtype.element_ty), mask=here)
    tl.store(scales + row, scale)


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows [R, K] to e4m3; returns them and the scale of each [R]."""
    rows = rows.contiguous()
    out = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    block = triton.next_power_of_2(rows.shape[1])
    warps = min(max(block // 512, 1), 16)
    _quantize[(len(rows),)](rows, out, scales, rows.shape[1], LARGEST=LARGEST, BLOCK=block, num_warps=warps)
    return out, scales


def scaled_product(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply [M, K] and [N, K] in e4m3 to [M, N]; K and N are multiples of 16."""
    scales = {"scale_a": left_scales[:, None], "scale_b": right_scales[None, :]}
    return torch._scaled_mm(left, right.t(), **scales, out_dtype=dtype, use_fast_accum=True)


def fp8_product(left: Tensor, right: Tensor) -> Tensor:
    """Compute left @ right.T of rows [M, K] and a weight [N, K], both quantized to e4m3."""
    return scaled_product(*quantize(left), *quantize(right), left.dtype)
