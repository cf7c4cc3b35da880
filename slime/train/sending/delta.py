"""The bytes that changed since the last version, found and encoded by the rank that owns a tensor.

Invariant: `Published` holds, on the host, every tensor that this rank owns as the engines have it, or it has no version
at all: a failure on the way leaves it without one, and the next update must be whole. A rank owns the same tensors each
time. What changed is encoded in threads.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from slime.models.delta.blob import Blob, ByteArray, checksum_function, encode
from slime.models.delta.folder import DeltaPart, write_part
from slime.models.delta.tensors import bytes_of
from slime.train.backends.protocol import TrainBackend
from slime.train.sending.export import not_written

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_THREADS = 32
_MAX_WAITING_BYTES = 2**30


class Published:
    """What was published last, as far as it is this rank's."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.given: dict[str, torch.Tensor] = {}
        """Parts of tensors that this rank gave to their owners, as they were then."""
        self._kept: dict[str, torch.Tensor] = {}

    def start_anew(self) -> None:
        """What follows is whole: nothing is known of what the engines have."""
        self.version = None
        self.given.clear()

    def whole(self, name: str) -> torch.Tensor | None:
        """A tensor that this rank owns, as it was published."""
        return self._kept.get(name)

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """These are published now."""
        for name, tensor in tensors.items():
            if name not in self._kept:
                self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[name].copy_(tensor)

    def changes(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, new value and `new ^ old` in bits of each tensor that changed, which is published from now on."""
        for name, tensor in tensors.items():
            new = tensor.contiguous()
            old = self._kept[name].to(new.device, non_blocking=True)
            difference = _bits(old).bitwise_xor(_bits(new))
            if difference.any():
                yield name, new, difference
                self._kept[name].copy_(new)


class DeltaExporter:
    """Encodes and writes this rank's share of a delta."""

    def __init__(
        self, published: Published, *, dtype: torch.dtype, encoding: str, checksum: str, buffer_size: int
    ) -> None:
        self._published = published
        self._dtype = dtype
        self._buffer_size = buffer_size
        self._encoding = encoding
        self._checksum = checksum_function(checksum)

    def export(self, backend: TrainBackend, folder: Path, *, version: int, base_version: int) -> DeltaPart:
        """All ranks together; afterwards `version` is what was published last."""
        if self._published.version != base_version:
            raise RuntimeError(f"version {self._published.version} was published last, not {base_version}")
        self._published.version = None
        began, part = time.perf_counter(), DeltaPart()
        blobs: dict[str, Blob] = {}
        checksums: dict[str, str] = {}
        for name, blob, checksum, changed in self._encoded(backend):
            blobs[name], checksums[name] = blob, checksum
            part.changed_bytes += changed
        part.encode_seconds = time.perf_counter() - began
        if blobs:
            path = folder / f"rank-{backend.topology.world.rank:05d}.safetensors"
            part.path, part.names = str(path), sorted(blobs)
            try:
                write_part(path, {name: blob.data for name, blob in blobs.items()}, checksums)
            except (OSError, SafetensorError) as cause:
                raise not_written(folder, version, cause) from cause
            part.write_seconds = time.perf_counter() - began - part.encode_seconds
        self._published.version = version
        return part

    def _encoded(self, backend: TrainBackend) -> Iterator[tuple[str, Blob, str, int]]:
        """Name, blob, checksum and number of changed bytes of the tensors that this rank owns."""
        waiting: deque[tuple[int, Future[tuple[str, Blob, str, int]]]] = deque()
        waiting_bytes = 0
        buckets = backend.hf_buckets(self._dtype, self._buffer_size, earlier=self._published)
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            for bucket in backend.progress.over(buckets, "comparing weights: bucket"):
                for name, value, difference in self._published.changes(bucket.tensors or {}):
                    new, changed = bytes_of(value), bytes_of(difference)
                    waiting.append((len(new), pool.submit(self._encode_one, name, new, changed)))
                    waiting_bytes += len(new)
                    while waiting_bytes > _MAX_WAITING_BYTES and len(waiting) > 1:
                        size, ready = waiting.popleft()
                        waiting_bytes -= size
                        yield ready.result()
            for _, ready in backend.progress.over(waiting, "encoding a delta: tensor", len(waiting)):
                yield ready.result()

    def _encode_one(self, name: str, new: ByteArray, difference: ByteArray) -> tuple[str, Blob, str, int]:
        blob = encode(difference, new, self._encoding)
        return name, blob, self._checksum(new), int(np.count_nonzero(difference))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_SAME_WIDTH[tensor.element_size()])
