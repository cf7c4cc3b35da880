"""Matrix products in 8-bit floats (e4m3), with a scale for each row of both factors (Triton, and torch's product).

    s_i = max_k |x_ik| / 448;  q = e4m3(x / s);  x @ w.T ~ (q_x @ q_w.T) * s_x * s_w.T

Invariant: the scales are those of the numbers at hand, so nothing overflows and nothing is remembered between calls. A
row of zeros stays one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 448.0
"""The largest number of e4m3."""


@triton.jit
def _quantize(x, out, scales, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < width
    value = tl.load(x + row * width + columns, mask=here, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-30) / LARGEST
    tl.store(out + row * width + columns, (value / scale).to(out.dtype.element_ty), mask=here)
    tl.store(scales + row, scale)


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, K] in e4m3, and the scale of each [R]."""
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
    """[M, K] and [N, K] in e4m3 to [M, N]; K and N are multiples of 16."""
    scales = {"scale_a": left_scales[:, None], "scale_b": right_scales[None, :]}
    return torch._scaled_mm(left, right.t(), **scales, out_dtype=dtype, use_fast_accum=True)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T of rows [M, K] and a weight [N, K]."""
    return scaled_product(*quantize(left), *quantize(right), left.dtype)
