"""Launches Triton kernels, or only compiles them when the tensors are on torch's `meta` device.

A step on `meta` tensors compiles every kernel of that step, so that the kernels are ready when the weights are loaded.

Programmatic dependent launch (PDL) starts a kernel before the previous one has ended, where the hardware supports it.
A kernel with `PDL` announces its successor at its start, loads its weights, and waits for its predecessor only before
it reads the predecessor's output. This is used where kernels are too short to fill the GPU: for one sequence.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


def launch(kernel: JITFunction, grid: tuple[int, ...], *args: object, **how: object) -> None:
    """Launch a kernel, or compile it if its first tensor is on `meta`; `how`: constants and launch options."""
    first = next(arg for arg in args if isinstance(arg, torch.Tensor))
    if not first.is_meta:
        kernel[grid](*args, **how)
        return
    kernel.warmup(*(arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args), grid=grid, **how)


try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton, with which no kernel is launched with PDL

    @triton.jit
    def gdc_launch_dependents() -> None:
        pass

    @triton.jit
    def gdc_wait() -> None:
        pass


__all__ = ["gdc_launch_dependents", "gdc_wait"]


@functools.cache
def _has_early_launch() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 4) and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def pdl_arguments(wanted: bool) -> dict[str, bool]:
    """Return the launch arguments that enable PDL if it is wanted and supported."""
    return {"PDL": True, "launch_pdl": True} if wanted and _has_early_launch() else {"PDL": False}


def next_power_of_two(n: int) -> int:
    """Return the next power of two."""
    return int(triton.next_power_of_2(n))
