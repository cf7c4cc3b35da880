"""Measures the tensor memory of a function with torch's profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile


def most_bytes(work: Callable[[], object]) -> int:
    """Return the peak bytes that `work` allocates on top of the memory in use before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    found = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = sorted((event for event in found if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in events]).max())


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Return the total bytes of the distinct storages of `tensors`."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
