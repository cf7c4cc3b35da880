"""Host memory that a GPU copies to and from at the full speed of the bus."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from slime.cluster.devices import cpu_cores

_PIECE = 1 << 28
_MOST_THREADS = 8

log = logging.getLogger(__name__)


def pinned_bytes(size: int) -> torch.Tensor:
    """So many bytes, locked in place for the life of the process.

    The pages are touched by several threads first: letting CUDA do it alone takes six times as long, and torch's own
    pinned memory is rounded up to a power of two. Where there is no CUDA, or it refuses, they are plain memory.
    """
    memory = np.empty(size, np.uint8)
    pieces = [memory[begin : begin + _PIECE] for begin in range(0, size, _PIECE)]
    with ThreadPoolExecutor(min(_MOST_THREADS, cpu_cores())) as pool:
        list(pool.map(lambda piece: piece.fill(0), pieces))
    if size and torch.cuda.is_available():
        status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, size, 0)
        if int(status):
            log.warning("CUDA cannot pin %.1f GiB of host memory (%s): copies will be slower", size / 2**30, status)
    return torch.from_numpy(memory)
