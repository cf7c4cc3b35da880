"""Host memory that a GPU copies to and from at the full speed of the bus."""

from __future__ import annotations

import contextlib
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from slime.cluster.devices import cpu_cores

_PIECE = 1 << 28
_MOST_THREADS = 8

log = logging.getLogger(__name__)


def pinned_bytes(size: int) -> torch.Tensor:
    """So many bytes, locked in place for as long as the tensor lives.

    Torch's own pinned memory is rounded up to a power of two. Where there is no CUDA, or it refuses, they are plain
    memory.
    """
    memory = np.empty(size, np.uint8)
    _touch(memory)
    pin(memory)
    return torch.from_numpy(memory)


def pin(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Lock memory in place while the array lives, where there is a GPU; it must have its pages already.

    Memory that is given back locked would have its addresses refused when the system hands them out again.
    """
    if not memory.nbytes or not torch.cuda.is_available():
        return
    address = memory.ctypes.data
    status = torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)
    if int(status):
        log.warning(
            "CUDA cannot pin %.1f GiB of host memory (error %d): copies will be slower",
            memory.nbytes / 2**30,
            int(status),
        )
        _take_report()
        return
    weakref.finalize(memory, torch.cuda.cudart().cudaHostUnregister, address).atexit = False


def _take_report() -> None:
    """The next kernel's launch reports the refusal as its own failure: be that kernel."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _touch(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Give it its pages, by several threads: letting CUDA do it alone takes six times as long."""
    pieces = [memory[begin : begin + _PIECE] for begin in range(0, memory.nbytes, _PIECE)]
    with ThreadPoolExecutor(min(_MOST_THREADS, cpu_cores())) as pool:
        list(pool.map(lambda piece: piece.fill(0), pieces))
