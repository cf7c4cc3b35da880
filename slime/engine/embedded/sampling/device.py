"""To the device and back without waiting, and how a kernel is launched there, or only compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Launch = Callable[..., None]
"""Takes a kernel, its grid, its arguments, and by name what it is compiled for."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **compiled_for: Any) -> None:
    kernel[grid](*arguments, **compiled_for)


def compile_only(kernel: Any, grid: tuple[int, ...], *arguments: Any, **compiled_for: Any) -> None:
    """Compile for arguments like these, whose tensors need not lie on the device."""
    types = (x.dtype if isinstance(x, torch.Tensor) else x for x in arguments)
    kernel.warmup(*types, grid=grid, **compiled_for)


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """torch keeps the pinned memory until the copy is done."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def put(into: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """Rows to their places, in the dtype there; nothing on `meta`, where torch would import sympy, seconds, for it."""
    if not into.is_meta:
        into.index_copy_(0, at.long(), values.to(into.dtype))


def bring(there: torch.Tensor) -> torch.Tensor:
    """To memory that may be read when the stream has come so far."""
    host = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
    host.copy_(there, non_blocking=True)
    return host
