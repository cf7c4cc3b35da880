"""Weights that a trainer on the same GPU put into memory of its own, opened by its handle.

Invariant: names and shapes are checked before the memory is opened, its size before anything is read; it is closed
again before the call is answered, so the trainer may write to it or free it then.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from slime.cluster.memory.cuda_driver import CudaDriver, CudaRefused, DeviceBytes
from slime.cluster.memory.device_region import aligned
from slime.engine.embedded.refusals import BadRequest, Conflict
from slime.engine.embedded.weights.groups import Announced
from slime.engine.embedded.weights.loading import check_shapes, load_tensors
from slime.engine.embedded.weights.views import FolderViews

_SOURCE = "the shared memory"


def load_from_handle(views: FolderViews, handle: bytes, bucket: Announced, device: torch.device) -> int:
    """Copy the tensors of a bucket, which lie one behind the other in the trainer's memory; the bytes copied."""
    check_shapes(views, dict(zip(bucket.names, bucket.shapes, strict=True)), _SOURCE)
    if device.type != "cuda":
        raise Conflict(f"this engine computes on {device.type}: it cannot open memory of a GPU", "handle")
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(bucket.shapes, bucket.dtypes, strict=True)]
    ends = list(accumulate(map(aligned, sizes)))
    torch.cuda.synchronize(device)  # the thread has a context from here on
    driver = CudaDriver(torch.cuda.current_device() if device.index is None else device.index)
    try:
        address, size = driver.open(handle)
    except CudaRefused as reason:
        raise Conflict(f"this engine cannot open the trainer's memory: {reason}", "handle") from reason
    try:
        if ends and size < ends[-1]:
            raise BadRequest(f"the tensors take {ends[-1]} bytes and the shared memory has {size}", "shapes")
        held = torch.as_tensor(DeviceBytes(address, size), device=device)
        tensors = {
            name: held[end - aligned(count) :][:count].view(kind).view(shape)
            for name, kind, shape, count, end in zip(
                bucket.names, bucket.dtypes, bucket.shapes, sizes, ends, strict=True
            )
        }
        copied = load_tensors(views, tensors, _SOURCE)
        torch.cuda.synchronize(device)
        return copied
    finally:
        driver.close(address)
