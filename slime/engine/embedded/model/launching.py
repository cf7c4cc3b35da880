"""Launching a Triton kernel, or only compiling it: tensors on torch's `meta` device stand for ones yet to come.

A step on `meta` tensors compiles every kernel of that step, so that kernels are ready when the weights are.
"""

from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **how: Any) -> None:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not tensors[0].is_meta:
        kernel[grid](*args, **how)
        return
    kernel.warmup(*(arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args), grid=grid, **how)
