"""A trainer that has nothing to do gives its device memory to the engines; what it must not lose waits on the host.

Invariant: a tensor that sleeps stays the tensor it is, views of it included: its storage has no memory until it wakes,
and then the bytes it had. Each storage has one copy on the host, whose room is made once and used again. Gradients and
gathered weights are dropped, and what did not change since it was last copied is not copied again.
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
from slime.train.backends.protocol import OPTIMIZER_STATE, Resident, TrainBackend

SMALLEST = 1 << 16  # bytes; what is smaller stays where it is

logger = logging.getLogger(__name__)


class Parked:
    """The tensors of one kind: their storages while they are away, and the room that they have on the host."""

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
        """What the copies take on the host."""
        return sum(host.numel() for host in self._hosts)

    def copy_out(self, storages: Sequence[UntypedStorage], resident: Resident) -> None:
        """Begin to copy to the host, on the present stream, unless the same is there already."""
        self.is_copied = True
        if resident.is_zero:
            return
        sizes, version = [storage.nbytes() for storage in storages], resident.version
        same_room = sizes == [host.numel() for host in self._hosts]
        if not same_room:
            self._hosts = _room_for(sizes, self._hosts)
        if not same_room or version is None or version != self._version:
            for host, storage in zip(self._hosts, storages, strict=True):
                host.copy_(_bytes_of(storage), non_blocking=True)
        self._version = version

    def free(self, storages: Sequence[UntypedStorage]) -> None:
        """Give the device's memory back; the copies are complete."""
        assert self.is_copied
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def take_memory(self) -> None:
        """Memory for all storages again, with nothing in it yet: `fill` or `wait` before it is used."""
        storages, self._storages, self.is_copied = self._storages, [], False
        for storage, size in storages:
            storage.resize_(size)
        self._empty = [storage for storage, _ in storages]

    def fill(self, stream: torch.cuda.Stream | None) -> None:
        """Begin to bring back what was there, on `stream`: `wait` before it is used."""
        storages, self._empty = self._empty, []
        if not storages:
            return
        if not self._hosts:
            for storage in storages:
                _bytes_of(storage).zero_()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())  # whoever had this memory before is done with it
        with _on(stream):
            for storage, host in zip(storages, self._hosts, strict=False):
                _bytes_of(storage).copy_(host, non_blocking=True)
            if stream is not None:
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def wait(self) -> None:
        """Whatever the present stream does from here on finds the tensors as they were."""
        if self._empty:
            self.fill(None)
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)


class Sleeper:
    """Puts the models of a trainer to sleep and wakes them. All ranks do it, each for its own memory."""

    def __init__(self, backends: Sequence[TrainBackend], device: torch.device, *, smallest: int = SMALLEST) -> None:
        self._backends = backends
        self._device = device
        self._smallest = smallest
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._parked: dict[tuple[int, str], Parked] = {}
        for number, backend in enumerate(backends):
            backend.before_update(partial(self._wait_for, number, OPTIMIZER_STATE))

    @property
    def is_asleep(self) -> bool:
        """Whether any of it is away."""
        return any(parked.is_away for parked in self._parked.values())

    def begin(self) -> None:
        """Begin to copy what an update changed: no other comes before the sleep, and publishing only reads."""
        if self.is_asleep:
            return
        self._follow()
        with _on(self._stream):
            for parked, resident, storages in self._residents():
                if resident.version is None:
                    parked.copy_out(storages, resident)

    def changed(self) -> None:
        """The weights are about to change: what was begun to be copied is out of date."""
        for parked in self._parked.values():
            parked.is_copied = False

    def sleep(self) -> None:
        """Give the memory back, as far as that is not done; it waits until the copies are complete."""
        began = time.perf_counter()
        for parked in self._parked.values():
            parked.wait()
        for backend in self._backends:
            backend.drop_gradients()
        self._follow()
        leaving = [one for one in self._residents() if not one[0].is_away]
        with _on(self._stream):
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
        logger.info("asleep: %.2f GiB on the host, %.2f left here, %.3f s", held / 2**30, left / 2**30, seconds)

    def wake(self, *, with_optimizer: bool = True) -> None:
        """Take the memory again; weights are in it on return, the optimizer's state after `bring_rest`."""
        if not self.is_asleep:
            return
        began = time.perf_counter()
        away = [(kind == OPTIMIZER_STATE, parked) for (_, kind), parked in self._parked.items() if parked.is_away]
        first, late = ([parked for is_late, parked in away if is_late is wanted] for wanted in (False, True))
        for parked in first:
            parked.take_memory()
            parked.fill(self._stream)
        for parked in late if with_optimizer else ():
            parked.take_memory()  # while the copies are on their way
        for parked in first:
            parked.wait()
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()
        logger.info("awake: %.3f s", time.perf_counter() - began)

    def bring_rest(self) -> None:
        """Begin to bring back what is not there yet, for the next update, which waits for it.

        What is needed before the update had better be on the device: samples that were sent behind 30 GB of this state
        took as long as all of it, on another stream though they were.
        """
        for parked in self._parked.values():
            parked.fill(self._stream)

    def settle(self) -> None:
        """Wait for everything that is still on its way."""
        for parked in self._parked.values():
            parked.wait()

    def _wait_for(self, number: int, kind: str) -> None:
        if (parked := self._parked.get((number, kind))) is not None:
            parked.wait()

    def _follow(self) -> None:
        """The side stream sees what the present one has done."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def _residents(self) -> Iterator[tuple[Parked, Resident, list[UntypedStorage]]]:
        """What there is now, without sets that are gone; a storage that several tensors share is the first one's."""
        seen: set[int] = set()
        present: dict[tuple[int, str], Parked] = {}
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
                present[key] = self._parked.get(key) or Parked()
                found.append((present[key], resident, storages))
        self._parked = present
        yield from found


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _room_for(sizes: Sequence[int], before: Sequence[Tensor]) -> list[Tensor]:
    """Host memory of these sizes; what there is of a size already is used again."""
    spare: dict[int, list[Tensor]] = {}
    for host in before:
        spare.setdefault(host.numel(), []).append(host)
    found = [spare[size].pop() if spare.get(size) else None for size in sizes]
    missing = [size for size, host in zip(sizes, found, strict=True) if host is None]
    ends = list(accumulate(missing))
    room = pinned_bytes(ends[-1] if ends else 0)
    fresh = iter([room[end - size : end] for size, end in zip(missing, ends, strict=True)])
    return [next(fresh) if host is None else host for host in found]
