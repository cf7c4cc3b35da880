"""Device memory through the CUDA driver (libcuda via ctypes), for calls that torch's allocator lacks.

ctypes and not cuda-python: its wheels are for one major version of CUDA and have to match torch's, while these calls
are the same in all drivers.

Invariant: a call that the driver rejects raises `CudaDriverError` with the driver's error name. Addresses and handles
are plain integers. The calling thread must have used the device through torch before.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p

IPC_HANDLE_BYTES = 64
_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3  # CU_MEM_LOCATION_TYPE_, CU_MEM_ALLOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_
_LAZY_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag


class CudaDriverError(RuntimeError):
    """Raised when the driver rejects a call, or there is no driver with that call."""


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
    """The CUDA driver's calls for one device."""

    def __init__(self, device: int) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as cause:
            raise CudaDriverError(f"there is no CUDA driver here: {cause}") from cause
        self._device = device
        self._prop = _AllocationProp(type=_PINNED, location=_Location(_DEVICE, device))

    # memory whose addresses outlive it

    def granularity(self) -> int:
        """Return the granularity of sizes and addresses of physical memory, in bytes."""
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(self._prop), c_uint(0))
        return size.value

    def reserve(self, size: int) -> int:
        """Reserve a range of addresses without memory; return the first address."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        return address.value

    def create(self, size: int) -> int:
        """Allocate physical memory; return its handle."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(self._prop), c_uint64(0))
        return handle.value

    def map(self, address: int, size: int, handle: int) -> None:
        """Map physical memory to reserved addresses, readable and writable by this device."""
        self._call("cuMemMap", c_uint64(address), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
        access = _AccessDesc(_Location(_DEVICE, self._device), _READ_WRITE)
        self._call("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1))

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", c_uint64(address), c_size_t(size))

    def release(self, handle: int) -> None:
        """Release physical memory; the driver frees it when it is no longer mapped."""
        self._call("cuMemRelease", c_uint64(handle))

    # memory that another process opens

    def share(self, address: int) -> tuple[bytes, int]:
        """Return the IPC handle of the allocation around `address`, and the offset of `address` in it."""
        handle, base, size = _IpcHandle(), c_uint64(), c_size_t()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        return bytes(handle), address - base.value

    def open(self, handle: bytes) -> tuple[int, int]:
        """Open another process's allocation on this or a peer device; return its address here and its size."""
        address, base, size = c_uint64(), c_uint64(), c_size_t()
        given = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), given, c_uint(_LAZY_PEERS))
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return address.value, base.value + size.value - address.value

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Start an asynchronous copy between addresses of this device or of memory opened here."""
        self._call("cuMemcpyDtoDAsync_v2", c_uint64(target), c_uint64(source), c_size_t(size), c_void_p(stream))

    def close(self, address: int) -> None:
        """Close an allocation that `open` returned."""
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise CudaDriverError(f"this CUDA driver has no {name}")
        status = function(*arguments)
        if status:
            error = ctypes.c_char_p()
            self._library.cuGetErrorName(status, byref(error))
            raise CudaDriverError(f"{name}: {(error.value or b'error %d' % status).decode()}")


class DeviceBytes:
    """Memory at an address for `torch.as_tensor`, which makes a byte tensor that does not own the memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }
