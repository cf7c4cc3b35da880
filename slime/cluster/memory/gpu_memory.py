"""How much memory of the GPUs is taken, as the driver sees it: by whomever, and whatever torch believes."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from typing import Any


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
