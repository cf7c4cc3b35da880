"""Between the tokens of a row and those of them that are computed (Triton)."""

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


@triton.jit
def _put_first(computed, place, first, whole, width, BLOCK: tl.constexpr):
    """A piece of one token of the row a program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(place + token).to(tl.int64)
    is_first = tl.load(first + source) == token
    value = tl.load(computed + source * width + columns, mask=is_first & (columns < width), other=0.0)
    tl.store(whole + token * width + columns, value, mask=columns < width)


def add_copies(grad: Tensor, copies: Tensor, starts: Tensor) -> Tensor:
    """[T, ...] to [t, ...]: row i is the sum of the rows `copies[starts[i]:starts[i + 1]]`."""
    rows = grad.contiguous()
    total = torch.empty(len(starts) - 1, *grad.shape[1:], dtype=grad.dtype, device=grad.device)
    width, block = _pieces(total)
    _add_copies[len(total), triton.cdiv(width, block)](rows, copies, starts, total, width, BLOCK=block)
    return total


def put_first(computed: Tensor, place: Tensor, first: Tensor) -> Tensor:
    """[t, ...] to [T, ...]: row i is `computed[place[i]]` where i is `first[place[i]]`, and zeros elsewhere."""
    whole = torch.empty(len(place), *computed.shape[1:], dtype=computed.dtype, device=computed.device)
    width, block = _pieces(whole)
    rows = computed.contiguous()
    _put_first[len(whole), triton.cdiv(width, block)](rows, place, first, whole, width, BLOCK=block)
    return whole


def _pieces(rows: Tensor) -> tuple[int, int]:
    """The width of a row, and of what a program has of it."""
    width = rows[0].numel()
    return width, min(_BLOCK, triton.next_power_of_2(width))
