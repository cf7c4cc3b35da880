"""Host regions shared by processes of one machine, pinned host memory, and device regions with stable addresses.

A `HostRegion` is a file in shared memory that is mapped once and kept. Invariant: its creator allocates every page
before it shares the path, so a full machine raises an `OSError` there and never a signal later. Each process that has a
GPU pins it once, so that copies run at the full speed of the bus.

A `DeviceRegion` is device memory that is released and restored under the same addresses. Invariant: a tensor in a
region keeps one address while the process lives, so code compiled or captured with it stays valid. While the region is
released its tensors have no memory and must not be accessed; after `take_back` their contents are undefined until
written.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from slime.cluster.devices import cpu_cores
from slime.cluster.memory.cuda_driver import CudaDriver, CudaDriverError, DeviceBytes

_PIECE = 1 << 28
_MOST_THREADS = 8

log = logging.getLogger(__name__)


def pinned_bytes(size: int) -> torch.Tensor:
    """Allocate `size` bytes of pinned memory for the lifetime of the tensor.

    Torch's own pinned memory is rounded up to a power of two. Without CUDA, or if it cannot pin, this is pageable
    memory.
    """
    memory = np.empty(size, np.uint8)
    # Several threads allocate the pages: CUDA alone would take six times as long.
    pieces = [memory[begin : begin + _PIECE] for begin in range(0, memory.nbytes, _PIECE)]
    with ThreadPoolExecutor(min(_MOST_THREADS, cpu_cores())) as pool:
        list(pool.map(lambda piece: piece.fill(0), pieces))
    pin(memory)
    return torch.from_numpy(memory)


def pin(memory: np.ndarray) -> None:
    """Pin memory while the array lives, if there is a GPU; its pages must be allocated already.

    It is unpinned before it is freed: otherwise CUDA could not pin the same addresses when the system reuses them.
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
    """Launch a dummy kernel to clear CUDA's pending error, which the next launch would otherwise report."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


class HostRegion:
    """The mapping of one shared file; `data` holds its bytes."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._inode = os.fstat(descriptor).st_ino
        memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        pin(memory)
        self.data = torch.from_numpy(memory)

    @classmethod
    def create(cls, path: Path, size: int) -> HostRegion:
        """Create a file of `size` bytes, replacing an existing one, and map it."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.truncate(descriptor, size)  # macOS
            return cls(path, descriptor)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path) -> HostRegion:
        """Map a region that another process created."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(path, descriptor)
        finally:
            os.close(descriptor)

    @property
    def is_current(self) -> bool:
        """True while the file at the path is still this one."""
        try:
            return self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False


ALIGNMENT = 512  # of device tensors, as in torch's own allocator


def align_up(size: int, multiple: int = ALIGNMENT) -> int:
    return -(-size // multiple) * multiple


class AddressRange:
    """Reserved device addresses that get physical memory from the front on demand."""

    def __init__(self, driver: CudaDriver, size: int) -> None:
        self._driver = driver
        self._granularity = driver.granularity()
        self._size = align_up(size, self._granularity)
        self.first = driver.reserve(self._size)
        self.used_bytes = 0
        self._sizes: list[int] = []  # of the consecutive pieces of physical memory
        self._handles: list[int] = []

    @property
    def backed_bytes(self) -> int:
        """The physical memory that backs the range now."""
        return sum(self._sizes[: len(self._handles)])

    @property
    def full_bytes(self) -> int:
        """The physical memory that backs the range when it is not released."""
        return sum(self._sizes)

    @property
    def is_released(self) -> bool:
        return len(self._handles) < len(self._sizes)

    def prepare(self, size: int) -> None:
        """Allocate memory for `size` more bytes in one piece."""
        missing = self.used_bytes + size - sum(self._sizes)
        if missing > 0:
            piece = align_up(missing, self._granularity)
            if sum(self._sizes) + piece > self._size:
                raise CudaDriverError(f"a region of {self._size} addresses has no room for {size} more bytes")
            self._back(piece, sum(self._sizes))
            self._sizes.append(piece)

    def take(self, size: int) -> int:
        """Allocate `size` bytes; return their address."""
        assert not self.is_released, "a released region cannot grow"
        self.prepare(align_up(size))
        address = self.first + self.used_bytes
        self.used_bytes += align_up(size)
        return address

    def release(self) -> None:
        """Free all physical memory; the addresses stay reserved."""
        offset = self.backed_bytes
        while self._handles:
            size, handle = self._sizes[len(self._handles) - 1], self._handles.pop()
            offset -= size
            self._driver.unmap(self.first + offset, size)
            self._driver.release(handle)

    def take_back(self) -> None:
        """Restore physical memory at all addresses: all of it, or `CudaDriverError` and none."""
        try:
            while self.is_released:
                self._back(self._sizes[len(self._handles)], self.backed_bytes)
        except CudaDriverError:
            self.release()
            raise

    def _back(self, size: int, offset: int) -> None:
        handle = self._driver.create(size)
        try:
            self._driver.map(self.first + offset, size, handle)
        except CudaDriverError:
            self._driver.release(handle)
            raise
        self._handles.append(handle)


class DeviceRegion:
    """Tensors on one GPU whose memory is released and restored together."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # creates the thread's CUDA context
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        self.range = AddressRange(CudaDriver(index), torch.cuda.get_device_properties(index).total_memory)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised tensor in this region."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        held = torch.as_tensor(DeviceBytes(self.range.take(size), size), device=self._device)
        return held.view(dtype).view(tuple(shape))

    def contents(self) -> torch.Tensor:
        """Return all used memory of the region as one byte tensor."""
        first, size = self.range.first, self.range.used_bytes
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(DeviceBytes(first, size), device=self._device)

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        self.range.release()

    def take_back(self) -> None:
        torch.cuda.synchronize(self._device)
        self.range.take_back()
