"""Weights for engines on the same GPU: a bucket at a time in device memory that they open by its handle.

Invariant: a bucket is complete in the memory when its handle is told, and stays until the next one is asked for; the
memory is kept for the next update until it is freed. All ranks call each method together; rank 0 has the buckets.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch

from slime.cluster.memory.cuda_driver import CudaDriver, CudaRefused, DeviceBytes
from slime.cluster.memory.device_region import aligned
from slime.train.backends.hf import HfBucket
from slime.train.backends.protocol import TrainBackend

SOURCE = (0,)
"""Who meets the engines: one trainer has all buckets."""


class SharedBuckets:
    """The memory and the update that is under way, if one is."""

    def __init__(self, *, dtype: torch.dtype, buffer_size: int) -> None:
        self._dtype = dtype
        self._buffer_size = buffer_size
        self._buckets: Iterator[HfBucket] = iter(())
        self._driver: CudaDriver | None = None
        self._address = 0
        self._size = 0

    def share(self, backend: TrainBackend, number: int) -> dict[str, Any]:
        """The handle of a bucket, on rank 0; on a GPU that has none to give, the reason for it.

        Buckets are asked for in order, and the first begins a new update.
        """
        if number == 1:
            self._buckets = backend.hf_buckets(self._dtype, self._buffer_size, owners=SOURCE)
        bucket = next(self._buckets)
        if bucket.tensors is None:
            return {}
        try:
            self._fill(list(bucket.tensors.values()), backend.topology.device)
            assert self._driver is not None
            return {"handle": base64.b64encode(self._driver.share(self._address)).decode()}
        except CudaRefused as reason:
            return {"refused": str(reason)}

    def stop(self) -> None:
        """Go to the end of the update, whatever came of it."""
        for _ in self._buckets:
            pass
        self._buckets = iter(())

    def free(self) -> None:
        """Give the memory back; it waits for whatever the device is doing."""
        driver, self._driver, self._size = self._driver, None, 0
        if driver is not None:
            driver.free(self._address)

    @torch.no_grad()
    def _fill(self, tensors: list[torch.Tensor], device: torch.device) -> None:
        ends = list(accumulate(aligned(tensor.nbytes) for tensor in tensors))
        torch.cuda.current_stream(device).synchronize()  # the device may be copying weights to the host besides
        self._make_room(ends[-1], torch.cuda.current_device() if device.index is None else device.index)
        held = torch.as_tensor(DeviceBytes(self._address, self._size), device=device)
        for tensor, end in zip(tensors, ends, strict=True):
            place = held[end - aligned(tensor.nbytes) :][: tensor.nbytes]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        torch.cuda.current_stream(device).synchronize()

    def _make_room(self, size: int, device: int) -> None:
        if self._driver is not None and size <= self._size:
            return
        driver = self._driver or CudaDriver(device)
        if self._driver is not None:
            self._driver = None
            driver.free(self._address)
        wanted = max(size, self._buffer_size)
        self._address = driver.allocate(wanted)
        self._driver, self._size = driver, wanted
