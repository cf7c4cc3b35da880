"""Weights for engines on the same machine: in memory that they open, of this GPU or of the host.

Invariant: a bucket is complete in the memory when its place is told, and stays until the next one is asked for or the
update ends. All tensors are one bucket where there is room for them, else the parts in which they are gathered are
buckets one after the other. Device memory is torch's own, so what the update leaves is what training takes next; a
region of the host is made once and kept. All ranks call each method together; rank 0 has the buckets.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.cluster.memory.cuda_driver import CudaDriver, CudaRefused
from slime.cluster.memory.regions import ALIGNMENT, HostRegion, aligned
from slime.train.backends.hf_buckets import HfBucket, HfTensor
from slime.train.backends.protocol import TrainBackend

SOURCE = (0,)
"""Who meets the engines: one trainer has all buckets."""
_WHOLE, _IN_PARTS, _REFUSED = "whole", "in parts", "refused: "

Plan = Sequence[tuple[HfTensor, ...]]


class SharedWeights:
    """The memory, and the update that is under way if one is."""

    def __init__(self, *, dtype: torch.dtype, buffer_size: int) -> None:
        self._dtype = dtype
        self._buffer_size = buffer_size
        self._parts: list[int] = []  # how many of the gathered buckets each of the shared ones is
        self._buckets: Iterator[HfBucket] = iter(())
        self._held: torch.Tensor | None = None
        self._memory: dict[str, Any] = {}
        self._region: HostRegion | None = None

    def share(self, backend: TrainBackend, number: int, region: str | None) -> dict[str, Any]:
        """Where a bucket is (`memory`, on rank 0), or why there is no memory for it (`refused`).

        Buckets are asked for in order; the first begins a new update, and its answer says what each has (`buckets`).
        """
        answer: dict[str, Any] = {}
        if number == 1:
            plan = backend.hf_plan(self._dtype, self._buffer_size, owners=SOURCE)
            outcome = self._begin(backend, plan, region)
            if outcome.startswith(_REFUSED):
                return {"refused": outcome.removeprefix(_REFUSED)}
            self._parts = [len(plan)] if outcome == _WHOLE else [1] * len(plan)
            told = [described(bucket) for bucket in plan]
            answer["buckets"] = [[one for bucket in told for one in bucket]] if outcome == _WHOLE else told
            gathered = backend.hf_buckets(self._dtype, self._buffer_size, owners=SOURCE)
            self._buckets = backend.progress.over(gathered, "sharing weights: bucket", len(plan))
        self._fill(self._parts[number - 1])
        return answer | {"memory": self._memory}

    def stop(self) -> None:
        """Go to the end of the update, whatever came of it; the device's memory is free again."""
        for _ in self._buckets:
            pass
        self._buckets, self._held, self._memory = iter(()), None, {}

    def _begin(self, backend: TrainBackend, plan: Plan, region: str | None) -> str:
        """Take the memory, on rank 0; all ranks know what came of it."""
        own = []
        if backend.topology.world.rank == 0:
            try:
                own = [self._take_memory(plan, region, backend.topology.device)]
            except (CudaRefused, OSError, torch.OutOfMemoryError) as reason:
                own = [f"{_REFUSED}{reason}"]
        (outcome,) = backend.topology.world.union(own)
        return outcome

    def _take_memory(self, plan: Plan, region: str | None, device: torch.device) -> str:
        sizes = [sum(aligned(tensor.nbytes) for tensor in bucket) for bucket in plan]
        if region is not None:
            if self._region is None or str(self._region.path) != region or self._region.data.numel() < sum(sizes):
                self._region = None  # the old one first: both may not have room
                self._region = HostRegion.create(Path(region), max(1, sum(sizes)))
            self._held, self._memory = self._region.data, {"region": region}
            return _WHOLE
        if device.type != "cuda":
            raise CudaRefused(f"the trainers compute on {device.type}")
        self._held = None
        try:
            self._held, outcome = torch.empty(sum(sizes), dtype=torch.uint8, device=device), _WHOLE
        except torch.OutOfMemoryError:
            self._held, outcome = torch.empty(max(sizes), dtype=torch.uint8, device=device), _IN_PARTS
        self._memory = _shared_by_handle(self._held)
        return outcome

    @torch.no_grad()
    def _fill(self, count: int) -> None:
        """Put so many of the gathered buckets into the memory, from its beginning."""
        begin, device = 0, None
        for _ in range(count):
            bucket = next(self._buckets)
            if bucket.tensors is None:
                continue
            assert self._held is not None
            tensors = list(bucket.tensors.values())
            places = []
            for tensor in tensors:
                places.append(_place(self._held, tensor, begin))
                begin += aligned(tensor.nbytes)
                device = tensor.device
            if self._held.is_cuda:
                torch._foreach_copy_(places, tensors)
            else:
                for place, tensor in zip(places, tensors, strict=True):
                    place.copy_(tensor, non_blocking=True)
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def described(bucket: Sequence[HfTensor]) -> list[dict[str, Any]]:
    """Tensors as engines are told of them."""
    return [
        {"name": one.name, "dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape)} for one in bucket
    ]


def _shared_by_handle(held: torch.Tensor) -> dict[str, Any]:
    device = held.device
    torch.cuda.current_stream(device).query()  # the thread has a context from here on
    driver = CudaDriver(torch.cuda.current_device() if device.index is None else device.index)
    handle, offset = driver.share(held.data_ptr())
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {"handle": base64.b64encode(handle).decode(), "offset": offset, "device": uuid}


def _place(held: torch.Tensor, like: torch.Tensor, begin: int) -> torch.Tensor:
    assert begin % ALIGNMENT == 0
    return held[begin:][: like.nbytes].view(like.dtype).view(like.shape)
