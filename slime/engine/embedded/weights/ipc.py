"""Copies weights from memory of a trainer on the same machine: of this GPU, of another one, or of the host.

Invariant: names and shapes are checked before the memory is opened, its size before anything is read. The memory is
opened outside of the engine's thread, which only copies. Device memory is closed before the call is answered, so the
trainer may write to it or free it then; a region of the host stays mapped for the next update.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from slime.cluster.memory.cuda_driver import CudaDriver, CudaDriverError, DeviceBytes
from slime.cluster.memory.regions import HostRegion, align_up
from slime.engine.embedded.errors import BadRequest, Conflict, PartialWrite, shown
from slime.engine.embedded.weights.loading import check_shapes
from slime.engine.embedded.weights.parameter_views import FolderViews
from slime.engine.embedded.weights.process_groups import AnnouncedBucket

_SOURCE = "the shared memory"


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the GPU `device` (its UUID), from `offset` on in the allocation with CUDA's `handle`."""

    handle: bytes
    offset: int
    device: str | None


@dataclass(frozen=True)
class HostMemory:
    """A file in shared memory."""

    path: str


@dataclass(frozen=True)
class MemorySlice:
    """The location of a tensor in the memory, in bytes."""

    begin: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def within(self, held: torch.Tensor) -> torch.Tensor:
        return held[self.begin :][: self.size].view(self.dtype).view(self.shape)


class OpenBucket:
    """The tensors of a bucket in a trainer's memory, which stays open while they are copied."""

    def __init__(
        self,
        bucket: AnnouncedBucket,
        views: FolderViews,
        size: int,
        copy: Callable[[list[torch.Tensor]], None],
        close: Callable[[], None],
    ) -> None:
        self.bucket = bucket
        self._views = views
        self._bytes = size
        self._copy: Callable[[list[torch.Tensor]], None] | None = copy  # to tensors of the model, in their order
        self._close_memory = close
        self._lock = threading.Lock()
        self.seconds: dict[str, float] = {}
        """Durations of opening the memory (`open_seconds`) and of copying its bytes (`copy_seconds`)."""

    @torch.no_grad()
    def load(self) -> int:
        """Copy all of it into the model; returns the bytes copied."""
        with self._lock:
            if self._copy is None:
                raise BadRequest("the sender of these weights did not wait until they were copied")
            targets = self._views.targets(self.bucket.names)
            began = time.perf_counter()
            try:
                self._copy([targets[name] for name in self.bucket.names])
            except RuntimeError as cause:
                raise PartialWrite(f"weights of {_SOURCE} could not be copied: {cause}") from cause
            self.seconds["copy_seconds"] = time.perf_counter() - began
        return self._bytes

    def close(self) -> None:
        with self._lock:
            if self._copy is not None:
                self._copy = None
                self._close_memory()


class SharedMemory:
    """Opens memory that a trainer names, in any thread: the model does not change; keeps the last host region open."""

    def __init__(self, views: FolderViews, device: torch.device) -> None:
        self._views = views
        self._device = device
        self._region: HostRegion | None = None
        self._lock = threading.Lock()

    def open(self, memory: DeviceMemory | HostMemory, bucket: AnnouncedBucket) -> OpenBucket:
        """Open the tensors of a bucket, which are stored in their order, each at a multiple of 512 bytes."""
        began, device = time.perf_counter(), self._device
        check_shapes(self._views, dict(zip(bucket.names, bucket.shapes, strict=True)), _SOURCE)
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(bucket.shapes, bucket.dtypes, strict=True)]
        places = [
            MemorySlice(end - align_up(size), size, kind, shape)
            for size, end, kind, shape in zip(
                sizes, accumulate(map(align_up, sizes)), bucket.dtypes, bucket.shapes, strict=True
            )
        ]
        needed = places[-1].begin + places[-1].size if places else 0
        held = self._map(memory) if isinstance(memory, HostMemory) else _GpuMemory(memory, device)
        try:
            size = held.numel() if isinstance(held, torch.Tensor) else held.size
            if size < needed:
                raise BadRequest(f"the tensors take {needed} bytes and {_SOURCE} has {size}", "shapes")
            if isinstance(held, torch.Tensor):
                sources = [place.within(held) for place in places]

                def copy(targets: list[torch.Tensor]) -> None:
                    for target, source in zip(targets, sources, strict=True):
                        target.copy_(source, non_blocking=True)
                    if device.type == "cuda":
                        torch.cuda.current_stream(device).synchronize()

                opened = OpenBucket(bucket, self._views, sum(sizes), copy, lambda: None)  # the region stays open
            else:
                opened = OpenBucket(bucket, self._views, sum(sizes), held.copies(places), held.close)
        except BaseException:
            if isinstance(held, _GpuMemory):
                held.close()
            raise
        opened.seconds["open_seconds"] = time.perf_counter() - began
        return opened

    def _map(self, memory: HostMemory) -> torch.Tensor:
        with self._lock:
            known = self._region
            if known is None or str(known.path) != memory.path or not known.is_current:
                self._region = None
                try:
                    known = self._region = HostRegion.open(Path(memory.path))
                except (OSError, ValueError) as cause:
                    raise Conflict(f"cannot open the shared memory {shown(memory.path)}: {cause}", "region") from cause
            return known.data


class _GpuMemory:
    """Opened memory of a GPU, of this one or of another one, which this process may not see."""

    def __init__(self, memory: DeviceMemory, device: torch.device) -> None:
        if device.type != "cuda":
            raise Conflict(f"this engine computes on {device.type}: it cannot open memory of a GPU", "handle")
        self._device = device
        self._set_device()
        self._driver = CudaDriver(torch.cuda.current_device() if device.index is None else device.index)
        self._is_here = memory.device in (None, str(torch.cuda.get_device_properties(device).uuid))
        try:
            self._address, size = self._driver.open(memory.handle)
        except CudaDriverError as reason:
            raise Conflict(f"this engine cannot open the trainer's memory: {reason}", "handle") from reason
        self.size = size - memory.offset
        self._first = self._address + memory.offset

    def _set_device(self) -> None:
        """Make the device current for the driver's calls in this thread: without CUDA calls it has no device yet."""
        torch.cuda.current_stream(self._device).query()

    def close(self) -> None:
        self._set_device()
        self._driver.close(self._address)

    def copies(self, places: Sequence[MemorySlice]) -> Callable[[list[torch.Tensor]], None]:
        """Return a function that copies the tensors at `places` to tensors of the model."""
        sources: list[torch.Tensor] = []
        if self._is_here:
            held = torch.as_tensor(DeviceBytes(self._first, self.size), device=self._device)
            sources = [place.within(held) for place in places]

        def copy(targets: list[torch.Tensor]) -> None:
            stream = torch.cuda.current_stream(self._device)
            if self._is_here:
                torch._foreach_copy_(targets, sources)
            else:  # torch cannot address it: its bytes are copied by address
                for target, place in zip(targets, places, strict=True):
                    fits = target.dtype == place.dtype and target.is_contiguous()
                    to = target if fits else torch.empty(place.shape, dtype=place.dtype, device=self._device)
                    self._driver.copy(to.data_ptr(), self._first + place.begin, place.size, stream.cuda_stream)
                    if not fits:
                        target.copy_(to)
            stream.synchronize()

        return copy
