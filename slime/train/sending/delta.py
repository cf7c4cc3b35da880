"""The bytes that changed since the last version, found on each rank's own shard before anything is gathered.

Invariant: `Published` holds, on the host, this rank's part of every tensor as the engines have it, or it has no version
at all: a failure on the way leaves it without one, and the next update must be whole. Of a layer, only tensors with a
changed byte on any rank are gathered; each of them is encoded by one rank (they take turns), in threads.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from slime.models.delta.blob import Blob, ByteArray, checksum_function, encode
from slime.models.delta.folder import DeltaPart, write_part
from slime.models.delta.tensors import bytes_of
from slime.train.backends.protocol import TrainBackend
from slime.train.sending.export import by_layer, not_written, rollout_dtype

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_THREADS = 32
_MAX_WAITING_BYTES = 2**30


class Published:
    """What was published last, as far as it is this rank's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.version: int | None = None
        self._parts: dict[str, torch.Tensor] = {}
        self._fused: set[str] = set()

    def remember(self, backend: TrainBackend, version: int) -> None:
        """The present weights are `version`, sent whole."""
        self.version = None
        self._fused = _fused(backend)
        for name, part in backend.local_parameters():
            self._replace(name, self._converted(part))
        self.version = version

    def _converted(self, part: torch.Tensor) -> torch.Tensor:
        """A copy in the rollout's dtype: training goes on with `part`."""
        return part.to(rollout_dtype(part.dtype, self.dtype), copy=True, memory_format=torch.contiguous_format)

    def _replace(self, name: str, part: torch.Tensor) -> None:
        """Keep `part`, or a copy of it in pinned memory where it lies on a GPU."""
        if not part.is_cuda:
            self._parts[name] = part
            return
        if name not in self._parts:
            self._parts[name] = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        self._parts[name].copy_(part)

    def changes(self, backend: TrainBackend) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Layer by layer: of each tensor that changed, its new value and `new ^ old`, whole, as in a model folder.

        The bits of a difference travel in the tensor's own dtype, since gloo gathers no 16-bit integers; nothing is
        computed with them. All ranks iterate together.
        What was remembered is replaced on the way, so an iteration must come to its end.
        """
        for members in by_layer(backend.local_parameters()):
            new = {name: self._converted(part) for name, part in members.items()}
            old = {name: self._parts[name].to(part.device, non_blocking=True) for name, part in new.items()}
            changed = _changed_anywhere(backend, new, old)
            if changed & self._fused:
                changed |= self._fused & new.keys()
            values: dict[str, torch.Tensor] = {}
            differences: dict[str, torch.Tensor] = {}
            for name in (name for name in new if name in changed):
                values[name] = backend.gather_part(name, new[name])
                bits = _bits(old[name]).bitwise_xor_(_bits(new[name]))  # what was remembered is replaced below
                differences[name] = backend.gather_part(name, bits.view(new[name].dtype))
                self._replace(name, new[name])
            whole, difference = backend.as_in_folder(values), backend.as_in_folder(differences)
            yield {name: (whole[name], difference[name]) for name in whole}


def _changed_anywhere(backend: TrainBackend, new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> set[str]:
    """The names of which any rank has a changed bit."""
    own = [not torch.equal(_bits(part), _bits(old[name])) for name, part in new.items()]
    flags = backend.topology.world.max(torch.tensor(own, dtype=torch.int32, device=backend.topology.world.device))
    return {name for name, flag in zip(new, flags.tolist(), strict=True) if flag}


class DeltaExporter:
    """Encodes and writes this rank's share of a delta."""

    def __init__(self, published: Published, *, encoding: str, checksum: str) -> None:
        self._published = published
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
        """Name, blob, checksum and number of changed bytes of the tensors whose turn it is on this rank."""
        waiting: deque[tuple[int, Future[tuple[str, Blob, str, int]]]] = deque()
        waiting_bytes = turn = 0
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            for layer in backend.progress.over(self._published.changes(backend), "comparing weights: layer"):
                for name, (value, difference) in layer.items():
                    turn += 1
                    if turn % backend.topology.world.size != backend.topology.world.rank:
                        continue
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


def _fused(backend: TrainBackend) -> set[str]:
    """Parameters that a model folder has under other names: those of a layer are converted together or not at all."""
    facts = backend.parameter_facts()
    empty = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in facts.items())
    names = (set(backend.as_in_folder(members)) for members in by_layer(empty))
    return set(facts).difference(*names)
