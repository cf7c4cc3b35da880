"""Shares weights with engines on the same machine through memory that they open, on this GPU or on the host.

Invariant: a bucket is complete in the memory when its place is returned, and stays until the next one is requested or
the update ends. All tensors form one bucket if there is memory for them; otherwise the gathered buckets are shared one
after the other. Device memory comes from torch's allocator, so training reuses it after the update; a host region is
allocated once and kept. All ranks call each method together; rank 0 has the buckets.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from slime.cluster.memory.cuda_driver import CudaDriver, CudaDriverError
from slime.cluster.memory.regions import ALIGNMENT, HostRegion, align_up
from slime.storage.json_types import JsonObject
from slime.train.actor import Actor
from slime.train.backends.hf_buckets import HfBucket, HfTensor
from slime.train.verbs import verb

SENDER_RANKS = (0,)
"""The ranks that serve the engines: rank 0 has all buckets."""
_WHOLE, _IN_PARTS, _REFUSED = "whole", "in parts", "refused: "


class SharedWeights:
    """The shared memory, and the state of the update in progress."""

    def __init__(self, actor: Actor, *, dtype: torch.dtype, buffer_size: int) -> None:
        self._actor = actor
        self._dtype = dtype
        self._buffer_size = buffer_size
        self._parts: list[int] = []  # the number of gathered buckets in each shared bucket
        self._buckets: Iterator[HfBucket] = iter(())
        self._held: torch.Tensor | None = None
        self._memory: JsonObject = {}
        self._region: HostRegion | None = None

    @verb()
    @torch.no_grad()
    def share_bucket(self, number: int, version: int, region: str | None = None) -> JsonObject:
        """Put a bucket into memory that engines on this machine open: device memory, or a host region at this path.

        Returns its place (`memory`, on rank 0), or the reason why it is impossible (`refused`). Buckets are requested
        in order; the first starts a new update, and its answer has the layouts (`buckets`).
        """
        backend = self._actor.backend
        answer: JsonObject = {}
        if number == 1:
            self._actor.remember_exported(version)
            plan, world = backend.export.plan(self._dtype, self._buffer_size, SENDER_RANKS), backend.topology.world
            planned = [bucket.tensors for bucket in plan]
            own = []
            if world.rank == 0:
                try:
                    own = [self._take_memory(planned, region, backend.topology.device)]
                except (CudaDriverError, OSError, torch.OutOfMemoryError) as reason:
                    own = [f"{_REFUSED}{reason}"]
            (outcome,) = world.union(own)
            if outcome.startswith(_REFUSED):
                return {"refused": outcome.removeprefix(_REFUSED)}
            self._parts = [len(plan)] if outcome == _WHOLE else [1] * len(plan)
            layouts = [tensor_layouts(bucket) for bucket in planned]
            answer["buckets"] = [[one for bucket in layouts for one in bucket]] if outcome == _WHOLE else layouts
            gathered = backend.export.buckets(plan)
            self._buckets = backend.progress.over(gathered, "sharing weights: bucket", len(plan))
        begin, device = 0, None
        for _ in range(self._parts[number - 1]):  # copy the next gathered buckets into the memory, from its start
            bucket = next(self._buckets)
            if bucket.tensors is None:
                continue
            assert self._held is not None
            tensors = list(bucket.tensors.values())
            places = []
            for tensor in tensors:
                assert begin % ALIGNMENT == 0
                places.append(self._held[begin:][: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
                begin += align_up(tensor.nbytes)
                device = tensor.device
            if self._held.is_cuda:
                torch._foreach_copy_(places, tensors)
            else:
                for place, tensor in zip(places, tensors, strict=True):
                    place.copy_(tensor, non_blocking=True)
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return answer | {"memory": self._memory}

    @verb()
    def stop_sharing(self) -> None:
        """End the update, successful or not, and free the device memory; engines have copied what they need."""
        for _ in self._buckets:
            pass
        self._buckets, self._held, self._memory = iter(()), None, {}

    def _take_memory(self, plan: Sequence[Sequence[HfTensor]], region: str | None, device: torch.device) -> str:
        """Allocate the memory; return if it holds all buckets or one at a time."""
        sizes = [sum(align_up(tensor.nbytes) for tensor in bucket) for bucket in plan]
        if region is not None:
            if self._region is None or str(self._region.path) != region or self._region.data.numel() < sum(sizes):
                self._region = None  # free the old region first: there may not be memory for both
                self._region = HostRegion.create(Path(region), max(1, sum(sizes)))
            self._held, self._memory = self._region.data, {"region": region}
            return _WHOLE
        if device.type != "cuda":
            raise CudaDriverError(f"the trainers compute on {device.type}")
        self._held = None
        try:
            self._held, outcome = torch.empty(sum(sizes), dtype=torch.uint8, device=device), _WHOLE
        except torch.OutOfMemoryError:
            self._held, outcome = torch.empty(max(sizes), dtype=torch.uint8, device=device), _IN_PARTS
        device = self._held.device
        torch.cuda.current_stream(device).query()  # creates the thread's CUDA context
        driver = CudaDriver(torch.cuda.current_device() if device.index is None else device.index)
        handle, offset = driver.share(self._held.data_ptr())
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._memory = {"handle": base64.b64encode(handle).decode(), "offset": offset, "device": uuid}
        return outcome


def tensor_layouts(bucket: Sequence[HfTensor]) -> list[JsonObject]:
    """Describe tensors for the engines."""
    return [
        {"name": one.name, "dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape)} for one in bucket
    ]
