"""Offloads an idle trainer's tensors to the host to free device memory for the engines.

Invariant: an offloaded tensor and its views stay valid objects: their storage has no memory while it is offloaded, and
the same bytes as before afterwards. Each storage has one copy on the host, whose memory is allocated once and reused.
Gradients and gathered weights are dropped, and tensors that did not change since the last copy are not copied again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, UntypedStorage

from slime.cluster.memory.regions import pinned_bytes
from slime.train.backend import OPTIMIZER_STATE, ResidentTensors, TrainBackend

SMALLEST = 1 << 16  # bytes; smaller storages stay on the device

logger = logging.getLogger(__name__)


class OffloadedTensors:
    """The tensors of one kind: their storages while they are offloaded, and their memory on the host."""

    def __init__(self) -> None:
        self._hosts: list[Tensor] = []
        self._storages: list[tuple[UntypedStorage, int]] = []
        self._empty: list[UntypedStorage] = []
        self._version: int | None = None
        self._arrived: torch.cuda.Event | None = None
        self.is_copied = False

    @property
    def is_away(self) -> bool:
        return bool(self._storages)

    @property
    def nbytes(self) -> int:
        """Size of the copies on the host."""
        return sum(host.numel() for host in self._hosts)

    def copy_out(self, storages: Sequence[UntypedStorage], resident: ResidentTensors) -> None:
        """Start to copy to the host on the current stream, unless the host has the same version."""
        self.is_copied = True
        if resident.is_zero:
            return
        sizes, version = [storage.nbytes() for storage in storages], resident.version
        fits = sizes == [host.numel() for host in self._hosts]
        if not fits:
            self._hosts = _host_buffers(sizes, self._hosts)
        if not fits or version is None or version != self._version:
            for host, storage in zip(self._hosts, storages, strict=True):
                host.copy_(_bytes_of(storage), non_blocking=True)
        self._version = version

    def free(self, storages: Sequence[UntypedStorage]) -> None:
        """Release the device memory; the copies must be complete."""
        assert self.is_copied
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def take_memory(self) -> None:
        """Allocate memory for all storages, without contents: call `fill` or `wait` before using it."""
        storages, self._storages, self.is_copied = self._storages, [], False
        for storage, size in storages:
            storage.resize_(size)
        self._empty = [storage for storage, _ in storages]

    def fill(self, stream: torch.cuda.Stream | None) -> None:
        """Start to copy the contents back on `stream`: call `wait` before using them."""
        storages, self._empty = self._empty, []
        if not storages:
            return
        if not self._hosts:
            for storage in storages:
                _bytes_of(storage).zero_()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())  # earlier kernels may still use this memory
        with _stream_context(stream):
            for storage, host in zip(storages, self._hosts, strict=False):
                _bytes_of(storage).copy_(host, non_blocking=True)
            if stream is not None:
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def wait(self) -> None:
        """Make later work on the current stream wait until the tensors have their contents."""
        if self._empty:
            self.fill(None)
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)


class TrainerOffload:
    """Offloads the models of a trainer and loads them again. All ranks do it, each for its own memory."""

    def __init__(self, backends: Sequence[TrainBackend], device: torch.device, *, smallest: int = SMALLEST) -> None:
        self._backends = backends
        self._device = device
        self._smallest = smallest
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._parked: dict[tuple[int, str], OffloadedTensors] = {}
        for number, backend in enumerate(backends):
            backend.register_update_hook(partial(self._wait_for, number, OPTIMIZER_STATE))

    @property
    def is_asleep(self) -> bool:
        """True if any tensor is offloaded."""
        return any(parked.is_away for parked in self._parked.values())

    def begin(self) -> None:
        """Start to copy what the last update before `sleep` changed; publishing only reads the weights."""
        if self.is_asleep:
            return
        self._follow()
        with _stream_context(self._stream):
            for parked, resident, storages in self._residents():
                if resident.version is None:
                    parked.copy_out(storages, resident)

    def changed(self) -> None:
        """Mark copies in progress as stale: the weights are about to change."""
        for parked in self._parked.values():
            parked.is_copied = False

    def sleep(self) -> None:
        """Offload all tensors that are on the device, and release their memory when the copies are complete."""
        began = time.perf_counter()
        for parked in self._parked.values():
            parked.wait()
        for backend in self._backends:
            backend.drop_gradients()
        self._follow()
        leaving = [one for one in self._residents() if not one[0].is_away]
        with _stream_context(self._stream):
            for parked, resident, storages in leaving:
                if not parked.is_copied or resident.version is not None:
                    parked.copy_out(storages, resident)
        if self._stream is not None:
            self._stream.synchronize()
        for parked, _, storages in leaving:
            parked.free(storages)
        if self._stream is not None:
            torch.cuda.empty_cache()
        held = sum(parked.nbytes for parked in self._parked.values())
        left = torch.cuda.memory_reserved(self._device) if self._stream is not None else 0
        seconds = time.perf_counter() - began
        logger.info("offloaded: %.2f GiB on the host, %.2f GiB left, %.3f s", held / 2**30, left / 2**30, seconds)

    def wake(self, *, with_optimizer: bool = True) -> None:
        """Allocate the memory again and load the weights; the optimizer state follows with `load_rest`."""
        if not self.is_asleep:
            return
        began = time.perf_counter()
        away = [(kind == OPTIMIZER_STATE, parked) for (_, kind), parked in self._parked.items() if parked.is_away]
        first, late = ([parked for is_late, parked in away if is_late is wanted] for wanted in (False, True))
        for parked in first:
            parked.take_memory()
            parked.fill(self._stream)
        for parked in late if with_optimizer else ():
            parked.take_memory()  # during the copies
        for parked in first:
            parked.wait()
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()
        logger.info("reloaded: %.3f s", time.perf_counter() - began)

    def load_rest(self) -> None:
        """Start to load the remaining tensors; the next update waits for them.

        Data that is needed before the update must be on the device already: samples copied after 30 GB of this state
        wait for all of it, even on another stream.
        """
        for parked in self._parked.values():
            parked.fill(self._stream)

    def settle(self) -> None:
        """Wait for all copies in progress."""
        for parked in self._parked.values():
            parked.wait()

    def _wait_for(self, number: int, kind: str) -> None:
        if (parked := self._parked.get((number, kind))) is not None:
            parked.wait()

    def _follow(self) -> None:
        """Make the side stream wait for the work of the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def _residents(self) -> Iterator[tuple[OffloadedTensors, ResidentTensors, list[UntypedStorage]]]:
        """Yield the current residents and their storages; a shared storage belongs to its first tensor.

        Entries of sets that no longer exist are dropped.
        """
        seen: set[int] = set()
        present: dict[tuple[int, str], OffloadedTensors] = {}
        found = []
        for number, backend in enumerate(self._backends):
            for resident in backend.resident():
                storages = []
                for tensor in resident.tensors:
                    storage = tensor.untyped_storage()
                    own = tensor.device.type == self._device.type and storage.nbytes() >= max(self._smallest, 1)
                    if own and storage.data_ptr() not in seen:
                        seen.add(storage.data_ptr())
                        storages.append(storage)
                key = (number, resident.kind)
                present[key] = self._parked.get(key) or OffloadedTensors()
                found.append((present[key], resident, storages))
        self._parked = present
        yield from found


def _stream_context(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_buffers(sizes: Sequence[int], before: Sequence[Tensor]) -> list[Tensor]:
    """Allocate host memory of these sizes; buffers in `before` are reused if their size matches."""
    spare: dict[int, list[Tensor]] = {}
    for host in before:
        spare.setdefault(host.numel(), []).append(host)
    found = [spare[size].pop() if spare.get(size) else None for size in sizes]
    missing = [size for size, host in zip(sizes, found, strict=True) if host is None]
    ends = list(accumulate(missing))
    room = pinned_bytes(ends[-1] if ends else 0)
    fresh = iter([room[end - size : end] for size, end in zip(missing, ends, strict=True)])
    return [next(fresh) if host is None else host for host in found]
