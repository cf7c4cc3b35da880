"""Device memory by the CUDA driver itself (libcuda through ctypes): what torch's allocator has no words for.

Invariant: a call that the driver refuses raises `CudaRefused` with the driver's own name for it; nothing is guessed.
Addresses and handles are plain integers. The calling thread must have used the device through torch before.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_ushort, c_void_p
from typing import Any

IPC_HANDLE_BYTES = 64
_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3  # CU_MEM_LOCATION_TYPE_, CU_MEM_ALLOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_
_LAZY_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag there is


class CudaRefused(RuntimeError):
    """The driver refused a call, or there is no driver that knows it."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", _AllocationFlags),
    )


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * IPC_HANDLE_BYTES),)


class CudaDriver:
    """The calls for one device."""

    def __init__(self, device: int) -> None:
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as cause:
            raise CudaRefused(f"there is no CUDA driver here: {cause}") from cause
        self._device = device
        self._prop = _AllocationProp(type=_PINNED, location=_Location(_DEVICE, device))

    # memory whose addresses outlive it

    def granularity(self) -> int:
        """What sizes and addresses of physical memory are multiples of."""
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._prop), c_uint(0))
        return size.value

    def reserve(self, size: int) -> int:
        """A range of addresses without memory; its first."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        return address.value

    def create(self, size: int) -> int:
        """Physical memory; its handle."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(self._prop), c_uint64(0))
        return handle.value

    def map(self, address: int, size: int, handle: int) -> None:
        """Put physical memory at addresses that have none, to be read and written by this device."""
        self._call("cuMemMap", c_uint64(address), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
        access = _AccessDesc(_Location(_DEVICE, self._device), _READ_WRITE)
        self._call("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", c_uint64(address), c_size_t(size))

    def release(self, handle: int) -> None:
        """Let go of physical memory, which is given back when no address has it."""
        self._call("cuMemRelease", c_uint64(handle))

    # memory that another process opens

    def share(self, address: int) -> tuple[bytes, int]:
        """What another process opens the allocation around `address` with, and how far into it that is."""
        handle, base, size = _IpcHandle(), c_uint64(), c_size_t()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        return bytes(handle), address - base.value

    def open(self, handle: bytes) -> tuple[int, int]:
        """Another process's allocation, of this device or of one that this one reaches: its address here, its size."""
        address, base, size = c_uint64(), c_uint64(), c_size_t()
        given = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), given, c_uint(_LAZY_PEERS))
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return address.value, base.value + size.value - address.value

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Begin to copy between addresses, of this device or of one whose memory is open here."""
        self._call("cuMemcpyDtoDAsync_v2", c_uint64(target), c_uint64(source), c_size_t(size), c_void_p(stream))

    def close(self, address: int) -> None:
        """Let go of what `open` gave."""
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise CudaRefused(f"this CUDA driver has no {name}")
        status = function(*arguments)
        if status:
            told = ctypes.c_char_p()
            self._library.cuGetErrorName(status, byref(told))
            raise CudaRefused(f"{name}: {(told.value or b'error %d' % status).decode()}")


class DeviceBytes:
    """Memory at an address, as `torch.as_tensor` takes it: a tensor of bytes that owns nothing."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


# How much memory of the GPUs is taken, as the driver sees it: by whomever, and whatever torch believes.


class NoGpuMemory(RuntimeError):
    """The driver's library does not say."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class GpuMemory:
    """The GPUs that this process may use, asked through NVML, which takes no memory of them itself."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as cause:
            raise NoGpuMemory(str(cause)) from cause
        self._call("nvmlInit_v2")
        self._handles = [self._handle(name) for name in self._names()]

    def used_bytes(self) -> int:
        """Of the GPU that has most of it taken."""
        found = _Memory()
        most = 0
        for handle in self._handles:
            self._call("nvmlDeviceGetMemoryInfo", handle, byref(found))
            most = max(most, int(found.used))
        return most

    def _names(self) -> list[str]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return [name.strip() for name in visible.split(",") if name.strip()]
        count = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(count))
        return [str(number) for number in range(count.value)]

    def _handle(self, name: str) -> c_void_p:
        handle = c_void_p()
        if name.isdecimal():
            self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(int(name)), byref(handle))
        else:
            self._call("nvmlDeviceGetHandleByUUID", name.encode(), byref(handle))
        return handle

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        status = -1 if function is None else function(*arguments)
        if status:
            raise NoGpuMemory(f"{name} gave {status}")
