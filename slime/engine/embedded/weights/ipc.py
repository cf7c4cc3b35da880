"""Weights that a trainer on the same machine put into memory of its own: of this GPU, of another one, or of the host.

Invariant: names and shapes are checked before the memory is opened, its size before anything is read. Opening happens
beside the engine's thread, which only copies. Device memory is closed before the call is answered, so the trainer may
write to it or free it then; a region of the host stays mapped for the next update.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch

from slime.cluster.memory.cuda_driver import CudaDriver, CudaRefused, DeviceBytes
from slime.cluster.memory.regions import HostRegion, aligned
from slime.engine.embedded.errors import BadRequest, Conflict, HalfWritten, shown
from slime.engine.embedded.weights.loading import check_shapes
from slime.engine.embedded.weights.parameter_views import FolderViews
from slime.engine.embedded.weights.process_groups import Announced

_SOURCE = "the shared memory"


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the GPU `device` (its UUID), from `offset` on in the allocation that CUDA names by `handle`."""

    handle: bytes
    offset: int
    device: str | None


@dataclass(frozen=True)
class HostMemory:
    """A file in shared memory."""

    path: str


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the memory."""

    begin: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def within(self, held: torch.Tensor) -> torch.Tensor:
        return held[self.begin :][: self.size].view(self.dtype).view(self.shape)


Copy = Callable[[Sequence[torch.Tensor]], None]
"""From the places of a bucket, in their order, to tensors of the model."""


class Source(Protocol):
    """Memory that is open."""

    @property
    def size(self) -> int: ...

    def copies(self, places: Sequence[Place]) -> Copy: ...

    def close(self) -> None: ...


class OpenBucket:
    """The tensors of a bucket in somebody's memory. A copy that is under way keeps it open."""

    def __init__(self, bucket: Announced, source: Source, places: Sequence[Place]) -> None:
        self.bucket = bucket
        self._source = source
        self._copy: Copy | None = source.copies(places)
        self._bytes = sum(place.size for place in places)
        self._lock = threading.Lock()
        self.seconds: dict[str, float] = {}
        """What opening it took (`open_seconds`), and copying its bytes (`copy_seconds`)."""

    @torch.no_grad()
    def load(self, views: FolderViews) -> int:
        """Copy all of it into the model; the bytes copied."""
        with self._lock:
            if self._copy is None:
                raise BadRequest("whoever sent these weights did not wait for them to be copied")
            targets = views.targets(self.bucket.names)
            began = time.perf_counter()
            try:
                self._copy([targets[name] for name in self.bucket.names])
            except RuntimeError as cause:
                raise HalfWritten(f"weights of {_SOURCE} could not be copied: {cause}") from cause
            self.seconds["copy_seconds"] = time.perf_counter() - began
        return self._bytes

    def close(self) -> None:
        with self._lock:
            if self._copy is not None:
                self._copy = None
                self._source.close()


class SharedMemory:
    """Opens what a trainer names; remembers the region of the host that it last had."""

    def __init__(self) -> None:
        self._region: HostRegion | None = None
        self._lock = threading.Lock()

    def open(
        self, memory: DeviceMemory | HostMemory, bucket: Announced, views: FolderViews, device: torch.device
    ) -> OpenBucket:
        """The tensors of a bucket, which lie there one behind the other, each at a multiple of 512 bytes."""
        began = time.perf_counter()
        check_shapes(views, dict(zip(bucket.names, bucket.shapes, strict=True)), _SOURCE)
        places = _places(bucket)
        source = self._host(memory, device) if isinstance(memory, HostMemory) else _device(memory, device)
        needed = places[-1].begin + places[-1].size if places else 0
        try:
            if source.size < needed:
                raise BadRequest(f"the tensors take {needed} bytes and {_SOURCE} has {source.size}", "shapes")
            opened = OpenBucket(bucket, source, places)
        except BaseException:
            source.close()
            raise
        opened.seconds["open_seconds"] = time.perf_counter() - began
        return opened

    def _host(self, memory: HostMemory, device: torch.device) -> Source:
        with self._lock:
            known = self._region
            if known is None or str(known.path) != memory.path or not known.is_current:
                self._region = None
                try:
                    self._region = HostRegion.open(Path(memory.path))
                except (OSError, ValueError) as cause:
                    raise Conflict(f"cannot open the shared memory {shown(memory.path)}: {cause}", "region") from cause
            assert self._region is not None
            return _FromHost(self._region.data, device)


class _FromHost:
    def __init__(self, held: torch.Tensor, device: torch.device) -> None:
        self._held = held
        self._device = device
        self.size = held.numel()

    def copies(self, places: Sequence[Place]) -> Copy:
        sources = [place.within(self._held) for place in places]

        def copy(targets: Sequence[torch.Tensor]) -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            _settle(self._device)

        return copy

    def close(self) -> None:
        """Nothing: the region is there for the next update."""


class _SameDevice:
    def __init__(self, driver: CudaDriver, memory: DeviceMemory, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._address, size = driver.open(memory.handle)
        self.size = size - memory.offset
        self._first = self._address + memory.offset

    def copies(self, places: Sequence[Place]) -> Copy:
        held = torch.as_tensor(DeviceBytes(self._first, self.size), device=self._device)
        sources = [place.within(held) for place in places]

        def copy(targets: Sequence[torch.Tensor]) -> None:
            torch._foreach_copy_(list(targets), sources)
            _settle(self._device)

        return copy

    def close(self) -> None:
        _use_in_this_thread(self._device)
        self._driver.close(self._address)


class _OtherDevice(_SameDevice):
    """torch has no name for the device, which this process need not see: bytes are copied by their addresses."""

    def copies(self, places: Sequence[Place]) -> Copy:
        def copy(targets: Sequence[torch.Tensor]) -> None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
            for target, place in zip(targets, places, strict=True):
                if target.dtype == place.dtype and target.is_contiguous():
                    self._driver.copy(target.data_ptr(), self._first + place.begin, place.size, stream)
                else:
                    arrived = torch.empty(place.shape, dtype=place.dtype, device=self._device)
                    self._driver.copy(arrived.data_ptr(), self._first + place.begin, place.size, stream)
                    target.copy_(arrived)
            _settle(self._device)

        return copy


def _device(memory: DeviceMemory, device: torch.device) -> Source:
    if device.type != "cuda":
        raise Conflict(f"this engine computes on {device.type}: it cannot open memory of a GPU", "handle")
    _use_in_this_thread(device)
    driver = CudaDriver(torch.cuda.current_device() if device.index is None else device.index)
    own = str(torch.cuda.get_device_properties(device).uuid)
    kind = _SameDevice if memory.device in (None, own) else _OtherDevice
    try:
        return kind(driver, memory, device)
    except CudaRefused as reason:
        raise Conflict(f"this engine cannot open the trainer's memory: {reason}", "handle") from reason


def _use_in_this_thread(device: torch.device) -> None:
    """The driver's calls are for the thread's device, which a thread has none of before it used one."""
    torch.cuda.current_stream(device).query()


def _places(bucket: Announced) -> list[Place]:
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(bucket.shapes, bucket.dtypes, strict=True)]
    ends = accumulate(map(aligned, sizes))
    return [
        Place(end - aligned(size), size, kind, shape)
        for size, end, kind, shape in zip(sizes, ends, bucket.dtypes, bucket.shapes, strict=True)
    ]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
