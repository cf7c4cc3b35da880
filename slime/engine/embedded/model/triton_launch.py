"""Launching a Triton kernel, or only compiling it: tensors on torch's `meta` device stand for ones yet to come.

A step on `meta` tensors compiles every kernel of that step, so that kernels are ready when the weights are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **how: Any) -> None:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not tensors[0].is_meta:
        kernel[grid](*args, **how)
        return
    kernel.warmup(*(arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args), grid=grid, **how)


# Launching a kernel before the one in front of it has ended, where that pays and the hardware has it.
#
# A kernel with `PDL` announces its successor at its start, asks for its weights, and waits for its predecessor only
# before it reads what that one wrote. It pays where kernels are too short to fill the GPU: one sequence.

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without them; no kernel is launched with PDL then

    @triton.jit
    def gdc_launch_dependents() -> None:
        pass

    @triton.jit
    def gdc_wait() -> None:
        pass


__all__ = ["early", "gdc_launch_dependents", "gdc_wait", "power"]


@functools.cache
def _has_early_launch() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 4) and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def early(wanted: bool) -> dict[str, Any]:
    """The arguments of a launch that say so."""
    return {"PDL": True, "launch_pdl": True} if wanted and _has_early_launch() else {"PDL": False}


def power(n: int) -> int:
    """The next power of two."""
    return int(triton.next_power_of_2(n))
