"""Launches kernel.cubin on the GPU as it is told on its standard input; who asks judges what comes back.

    python -I -S cuda_runner.py                the commands of runner.c
    python -I -S cuda_runner.py about [CARD]   one JSON object: the GPU's name, its architecture, the driver's version

Invariant: of a model's work only device code is here. No line of its Python runs in this process, so the clock, the
GPU's own (events before and after the launch), is out of its reach, and so are the results, which are not here. With
each y comes, as one more float, how many milliseconds its launch took.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
import sys
from array import array
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

LOAD, RUN, GUARD = 1, 2, 16
MAJOR, MINOR, DYNAMIC_SHARED = 75, 76, 8
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
SMALL_SHARED = 48 << 10
NAN = struct.unpack("<I", struct.pack("<f", math.nan))[0]
READY = b"ready\n"
"""What is written once there is a GPU: what fails afterwards is the kernel's doing, what fails before is not."""
FAILED = 3
"""The exit code where the GPU refused: a kernel that reads what is nobody's, say."""


class Cuda:
    """The few calls of libcuda that are needed; what it refuses ends the program."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *words: object) -> None:
        code = self._library[name](*words)
        if code != 0:
            print(f"{name}: CUDA error {code}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(FAILED)

    def number(self, name: str, *words: object) -> int:
        """Of a call that writes an int through its first argument."""
        out = c_int()
        self.call(name, byref(out), *words)
        return out.value


def about(cuda: Cuda, card: int) -> dict[str, object]:
    """What verdicts depend on."""
    device, name = cuda.number("cuDeviceGet", card), ctypes.create_string_buffer(100)
    cuda.call("cuDeviceGetName", name, len(name), device)
    major, minor = (cuda.number("cuDeviceGetAttribute", which, device) for which in (MAJOR, MINOR))
    return {"name": name.value.decode(), "arch": 10 * major + minor, "driver": cuda.number("cuDriverGetVersion")}


class Buffer:
    """Floats on the GPU, with a guard behind them."""

    def __init__(self, cuda: Cuda, count: int) -> None:
        self._cuda, self.count, self.at = cuda, count, c_uint64()
        cuda.call("cuMemAlloc_v2", byref(self.at), c_size_t(4 * (count + GUARD)))
        self.fill(0, count + GUARD, NAN)

    def fill(self, first: int, count: int, bits: int) -> None:
        if count:
            self._cuda.call("cuMemsetD32_v2", c_uint64(self.at.value + 4 * first), c_uint(bits), c_size_t(count))

    def put(self, data: bytes) -> None:
        if data:
            self._cuda.call("cuMemcpyHtoD_v2", self.at, data, c_size_t(len(data)))

    def get(self) -> bytes:
        data = ctypes.create_string_buffer(4 * (self.count + GUARD))
        self._cuda.call("cuMemcpyDtoH_v2", data, self.at, c_size_t(len(data)))
        return data.raw

    def free(self) -> None:
        self._cuda.call("cuMemFree_v2", self.at)


class Kernel:
    """The cubin of this folder."""

    def __init__(self, cuda: Cuda) -> None:
        with open("kernel.json") as file:
            self._launch = json.load(file)
        with open("kernel.cubin", "rb") as file:
            image = file.read()
        self._cuda, self._grids = cuda, {tuple(size): grid for size, grid in self._launch["grids"]}
        module, self._function = c_void_p(), c_void_p()
        cuda.call("cuModuleLoadData", byref(module), image)
        cuda.call("cuModuleGetFunction", byref(self._function), module, self._launch["name"].encode())
        if self._launch["shared"] > SMALL_SHARED:
            cuda.call("cuFuncSetAttribute", self._function, DYNAMIC_SHARED, self._launch["shared"])
        self._events = [c_void_p(), c_void_p()]
        for event in self._events:
            cuda.call("cuEventCreate", byref(event), 0)

    def milliseconds(self, n: int, m: int, a: float, b: float, buffers: list[Buffer]) -> float:
        """Launch it, wait for its end, and say how long the GPU took."""
        values = [c_int(n), c_int(m), c_float(a), c_float(b), *(buffer.at for buffer in buffers)]
        values += [c_uint64(), c_uint64()]  # Triton's scratch memory: none was asked for
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        before, after = self._events
        grid, launch = self._grids[n, m], self._launch
        self._cuda.call("cuEventRecord", before, None)
        self._cuda.call(
            "cuLaunchKernel", self._function, *grid, launch["threads"], 1, 1, launch["shared"], None, pointers, None
        )
        self._cuda.call("cuEventRecord", after, None)
        self._cuda.call("cuEventSynchronize", after)
        took = c_float()
        self._cuda.call("cuEventElapsedTime", byref(took), before, after)
        return took.value


def take(count: int) -> bytes:
    """So many bytes of the standard input; the end of it ends the program."""
    data = sys.stdin.buffer.read(count)
    if len(data) < count:
        os._exit(0)
    return data


def serve(cuda: Cuda) -> None:
    """Do what is asked until nobody asks."""
    context = c_void_p()
    cuda.call("cuDevicePrimaryCtxRetain", byref(context), cuda.number("cuDeviceGet", 0))
    cuda.call("cuCtxSetCurrent", context)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    kernel, buffers, n, m = Kernel(cuda), [], 0, 0
    while True:
        command, *numbers = struct.unpack("<5i", take(20))
        if command == LOAD:
            for buffer in buffers:
                buffer.free()
            n, m, w_length, length = numbers
            buffers = [Buffer(cuda, count) for count in (n * m, w_length, length)]
            buffers[0].put(take(4 * n * m))
            buffers[1].put(take(4 * w_length))
        elif command == RUN:
            y = buffers[2]
            for _ in range(numbers[0]):
                pair = take(8)
                a, b = struct.unpack("<2f", pair)
                y.fill(0, y.count, NAN)
                y.fill(y.count, GUARD, struct.unpack("<I", pair[:4])[0])
                took = kernel.milliseconds(n, m, a, b, buffers)
                sys.stdout.buffer.write(y.get() + array("f", [took]).tobytes())
            sys.stdout.buffer.flush()
        else:
            os._exit(2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["about"]:
        print(json.dumps(about(Cuda(), int((sys.argv[2:] or ["0"])[0]))))
    else:
        serve(Cuda())
