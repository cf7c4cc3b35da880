"""Sums over the copies of a row's tokens (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _add_copies(grad, copies, starts, total, width, BLOCK: tl.constexpr):
    """A piece of one computed token a program: its copies, one after the other, in float32."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = columns < width
    value = tl.zeros([BLOCK], tl.float32)
    for at in range(tl.load(starts + token), tl.load(starts + token + 1)):
        copy = tl.load(copies + at).to(tl.int64)
        value += tl.load(grad + copy * width + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(total + token * width + columns, value.to(total.dtype.element_ty), mask=here)


def add_copies(grad: Tensor, copies: Tensor, starts: Tensor) -> Tensor:
    """[T, ...] to [t, ...]: row i is the sum of the rows `copies[starts[i]:starts[i + 1]]`."""
    rows = grad.contiguous()
    total = torch.empty(len(starts) - 1, *grad.shape[1:], dtype=grad.dtype, device=grad.device)
    width = total[0].numel()
    block = min(_BLOCK, triton.next_power_of_2(width))
    _add_copies[len(total), triton.cdiv(width, block)](rows, copies, starts, total, width, BLOCK=block)
    return total
