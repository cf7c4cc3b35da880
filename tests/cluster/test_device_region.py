"""Memory that is released and remapped at stable addresses, with a fake driver as strict as CUDA's."""

from __future__ import annotations

import pytest

from slime.cluster.memory.cuda_driver import CudaDriverError
from slime.cluster.memory.regions import AddressRange, align_up

PAGE = 2 << 20


class Device:
    """Fake GPU of `size` bytes: maps only free addresses, and unmaps only whole mappings."""

    def __init__(self, size: int) -> None:
        self.free = size
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self._next = 0

    def granularity(self) -> int:
        return PAGE

    def reserve(self, size: int) -> int:
        assert size % PAGE == 0
        return 1 << 40

    def create(self, size: int) -> int:
        assert size > 0
        assert size % PAGE == 0
        if size > self.free:
            raise CudaDriverError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self.free -= size
        self._next += 1
        self.handles[self._next] = size
        return self._next

    def map(self, address: int, size: int, handle: int) -> None:
        assert self.handles[handle] == size
        assert address % PAGE == 0
        assert not any(first < address + size and address < first + held for first, (held, _) in self.mapped.items())
        self.mapped[address] = (size, handle)

    def unmap(self, address: int, size: int) -> None:
        held, handle = self.mapped.pop(address)
        assert held == size
        if handle not in self.handles:
            self.free += size

    def release(self, handle: int) -> None:
        size = self.handles.pop(handle)
        if not any(held == handle for _, held in self.mapped.values()):
            self.free += size


def test_allocations_are_disjoint_aligned_and_backed() -> None:
    device = Device(64 * PAGE)
    held = AddressRange(device, 32 * PAGE)
    first, second, third = held.take(100), held.take(3 * PAGE), held.take(1)
    assert second == first + align_up(100)
    assert third == second + 3 * PAGE
    assert held.backed_bytes == 4 * PAGE
    assert device.free == 60 * PAGE


def test_prepared_memory_is_one_mapping() -> None:
    device = Device(64 * PAGE)
    held = AddressRange(device, 32 * PAGE)
    held.prepare(10 * PAGE)
    for _ in range(10):
        held.take(PAGE)
    assert [size for size, _ in device.mapped.values()] == [10 * PAGE]


def test_released_memory_returns_at_the_same_addresses() -> None:
    device = Device(64 * PAGE)
    held = AddressRange(device, 32 * PAGE)
    before = [held.take(size) for size in (5 * PAGE, 7, 2 * PAGE)]
    mapped = sorted((address, size) for address, (size, _) in device.mapped.items())
    for _ in range(2):
        held.release()
        assert (device.free, device.mapped, device.handles) == (64 * PAGE, {}, {})
        assert (held.is_released, held.backed_bytes, held.full_bytes) == (True, 0, 8 * PAGE)
        held.take_back()
        assert sorted((address, size) for address, (size, _) in device.mapped.items()) == mapped
    assert held.take(1) > max(before)


def test_failed_take_back_leaves_nothing_mapped() -> None:
    device = Device(10 * PAGE)
    held = AddressRange(device, 10 * PAGE)
    held.take(4 * PAGE)
    held.take(4 * PAGE)
    held.release()
    other = device.create(3 * PAGE)
    with pytest.raises(CudaDriverError, match="OUT_OF_MEMORY"):
        held.take_back()
    assert (device.free, device.mapped) == (7 * PAGE, {})
    device.release(other)
    held.take_back()
    assert held.backed_bytes == 8 * PAGE


def test_allocation_beyond_the_region_is_rejected() -> None:
    held = AddressRange(Device(64 * PAGE), 2 * PAGE)
    with pytest.raises(CudaDriverError, match="no room"):
        held.take(3 * PAGE)
