"""The gate of a SwiGLU block: silu(gate) * up, of the two halves of one product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime.engine.embedded.fused.launch import early, gdc_launch_dependents, gdc_wait
from slime.engine.embedded.model.launching import launch

_BLOCK = 1024


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of fp32 values, rounded where transformers rounds."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up


@triton.jit
def _swiglu_kernel(X, Y, I: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: E741
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(X + t * 2 * I + i, mask=i < I, other=0.0).to(tl.float32)
    up = tl.load(X + t * 2 * I + I + i, mask=i < I, other=0.0).to(tl.float32)
    tl.store(Y + t * I + i, gated(gate, up, Y.dtype.element_ty).to(Y.dtype.element_ty), mask=i < I)


def swiglu(gate_up: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    """`out [T, I]` of `gate_up [T, 2 I]`."""
    tokens, width = out.shape
    grid = (tokens, triton.cdiv(width, _BLOCK))
    launch(_swiglu_kernel, grid, gate_up, out, I=width, BLOCK=_BLOCK, num_warps=4, **early(pdl))
