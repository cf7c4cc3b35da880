"""A tensor as the bytes that deltas and checksums are made of: little endian, C order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes on the host: the tensor's own memory if it is contiguous and on the CPU, else a copy.

    From a GPU they come into pinned memory, in both directions several times as fast; torch keeps and reuses it.
    """
    tensor = tensor.detach().contiguous()
    if tensor.is_cuda:
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array
