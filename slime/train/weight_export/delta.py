"""Finds the bytes that changed since the last version on the weights' device and encodes them on the owning rank.

Invariant: `PublishedWeights` holds, on the host, every tensor that this rank owns as the engines have it, or it has no
version: a failed update leaves it without one, and the next update must send whole weights. A rank owns the same
tensors in every update. The published bytes are copied to the device for the comparison, and only changed bytes are
copied back. They are encoded in threads.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from slime.cluster.memory.regions import align_up, pinned_bytes
from slime.models.delta.apply import bytes_of, tensor_checksums
from slime.models.delta.blob import ByteArray, TensorDiff, checksum_function, encode
from slime.models.delta.folder import DeltaPart, write_part
from slime.train.backend import TrainBackend
from slime.train.weight_export.files import export_error

_MAX_THREADS = 32
_MAX_WAITING_BYTES = 2**30
_WORD = 8
_COMPARED_BYTES = 1 << 26


class PublishedBucket:
    """The tensors of a bucket as they were last published, concatenated in host memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        ends = list(accumulate(align_up(tensor.nbytes) for tensor in tensors.values()))
        self._begins = dict(zip(tensors, [0, *ends[:-1]], strict=True))
        self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        self._held = pinned_bytes(ends[-1])

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True if these tensors have the same names and sizes in the same order."""
        return {name: one.nbytes for name, one in tensors.items()} == {n: one.nbytes for n, one in self._like.items()}

    def of(self, name: str) -> torch.Tensor:
        """Return the published tensor."""
        like = self._like[name]
        return self._held[self._begins[name] :][: like.nbytes].view(like.dtype).view(like.shape)

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors as published."""
        for name, tensor in tensors.items():
            self.of(name).copy_(tensor, non_blocking=True)
        device = next(iter(tensors.values())).device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    @torch.no_grad()
    def changes(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, TensorDiff]]:
        """Yield the changes of each tensor that differs; all tensors are compared at once."""
        device = next(iter(tensors.values())).device
        old = self._held.to(device, non_blocking=True)
        new = torch.zeros(self._held.numel(), dtype=torch.uint8, device=device)
        places = [
            new[self._begins[name] :][: one.nbytes].view(one.dtype).view(one.shape) for name, one in tensors.items()
        ]
        torch._foreach_copy_(places, list(tensors.values()))
        difference = old ^ new  # on a CPU `old` is the published memory itself
        del old
        positions = changed_bytes(difference)
        found, xors, values = (one.cpu().numpy() for one in (positions, difference[positions], new[positions]))
        begins = np.array(list(self._begins.values()))
        for name, first, last in zip(
            self._begins, np.searchsorted(found, begins), [*np.searchsorted(found, begins[1:]), len(found)], strict=True
        ):
            if last > first:
                own, begin, size = slice(first, last), self._begins[name], self._like[name].nbytes
                whole = None if difference.is_cuda else difference[begin : begin + size].numpy()
                yield name, TensorDiff(size, found[own] - begin, xors[own], values[own], whole)

    def take(self, name: str, changes: TensorDiff) -> None:
        """Apply the changes of a tensor to the published bytes."""
        whole = self._held.numpy()[self._begins[name] :][: changes.size]
        whole[changes.positions] = changes.values


class PublishedWeights:
    """The last published weights that this rank owns."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.given: dict[str, torch.Tensor] = {}
        """Parts of tensors that this rank sent to their owners, as published."""
        self._kept: dict[str, PublishedBucket] = {}

    def forget_version(self) -> None:
        """Forget the version: the next update sends whole weights."""
        self.version = None
        self.given.clear()

    def whole(self, name: str) -> torch.Tensor | None:
        """Return a published tensor that this rank owns; None if it is not known."""
        return self._kept[name].of(name) if name in self._kept else None

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store these tensors as published."""
        if tensors:
            known = self._kept.get(next(iter(tensors)))
            if known is None or not known.fits(tensors):
                known = PublishedBucket(tensors)
                self._kept |= dict.fromkeys(tensors, known)
            known.keep(tensors)

    def changes(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, TensorDiff]]:
        """Yield the changes of these tensors since they were published; call `take` when they are published."""
        bucket = self._kept[next(iter(tensors))]
        if not bucket.fits(tensors):
            raise RuntimeError(f"the bucket of {next(iter(tensors))} has other tensors than in the last update")
        yield from bucket.changes(tensors)

    def take(self, name: str, changes: TensorDiff) -> None:
        """Record the changes of a tensor as published."""
        self._kept[name].take(name, changes)


def export_delta(
    backend: TrainBackend,
    published: PublishedWeights,
    folder: Path,
    *,
    version: int,
    base_version: int,
    dtype: torch.dtype,
    buffer_size: int,
    encoding: str,
    checksum: str,
) -> DeltaPart:
    """Encode and write this rank's share of a delta, and set the published version; all ranks call it together."""
    if published.version != base_version:
        raise RuntimeError(f"the last published version is {published.version}, not {base_version}")
    published.version = None
    began, part = time.perf_counter(), DeltaPart()
    checksum_of = checksum_function(checksum)
    blobs: dict[str, bytes] = {}
    checksums: dict[str, str] = {}

    def encode_one(name: str, changes: TensorDiff, content: str | ByteArray) -> None:
        """Encode the changes of a tensor and record them as published; `content` is its checksum or its bytes."""
        blob = encode(changes, encoding)
        published.take(name, changes)
        blobs[name], checksums[name] = blob.data, content if isinstance(content, str) else checksum_of(content)

    waiting: deque[tuple[int, Future[None]]] = deque()
    waiting_bytes = 0
    buckets = backend.export.buckets(backend.export.plan(dtype, buffer_size), published)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for bucket in backend.progress.over(buckets, "comparing weights: bucket"):
            tensors = bucket.tensors or {}
            changed = dict(published.changes(tensors)) if tensors else {}
            part.changed_bytes += sum(len(changes.positions) for changes in changed.values())
            unequal = {name: tensors[name] for name in changed}
            contents: Iterable[tuple[str, str | ByteArray]]
            if checksum == "sum64" and any(tensor.is_cuda for tensor in unequal.values()):
                contents = tensor_checksums(unequal.items(), checksum).items()
            else:  # a thread computes the checksum
                contents = ((name, bytes_of(tensor)) for name, tensor in unequal.items())
            for name, content in contents:
                changes = changed.pop(name)
                waiting.append((changes.size, pool.submit(encode_one, name, changes, content)))
                waiting_bytes += changes.size
            while waiting_bytes > _MAX_WAITING_BYTES and len(waiting) > 1:
                size, ready = waiting.popleft()
                waiting_bytes -= size
                ready.result()
        for _, ready in backend.progress.over(waiting, "encoding a delta: tensor", len(waiting)):
            ready.result()
    part.encode_seconds = time.perf_counter() - began
    if blobs:
        path = folder / f"rank-{backend.topology.world.rank:05d}.safetensors"
        part.path, part.names = str(path), sorted(blobs)
        try:
            write_part(path, blobs, checksums)
        except (OSError, SafetensorError) as cause:
            raise export_error(folder, version, cause) from cause
        part.write_seconds = time.perf_counter() - began - part.encode_seconds
    published.version = version
    return part


def changed_bytes(difference: torch.Tensor) -> torch.Tensor:
    """Return the positions of non-zero bytes, ascending.

    Whole words are tested first, because few bytes change. The number of bytes must be a multiple of eight. Blocks of
    `_COMPARED_BYTES` limit the memory for positions.
    """
    found = []
    for begin in range(0, difference.numel(), _COMPARED_BYTES):
        part = difference[begin : begin + _COMPARED_BYTES]
        words = part.view(torch.int64).nonzero()
        near = (words * _WORD + torch.arange(_WORD, device=words.device)).view(-1)
        found.append(near[part[near] != 0] + begin)
    return torch.cat(found)
