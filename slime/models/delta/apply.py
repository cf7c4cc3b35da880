"""Applies a delta to the weights that it was made for: tensors in memory, or the files of a model folder.

Invariant: afterwards all tensors have exactly the sender's bytes, verified by checksum; on any failure the tensors in
memory have their old bytes, and so has the failed tensor of a file. `PartiallyApplied` is raised if the old bytes
cannot be restored. For tensors on a GPU only the changed bytes are copied there; the tensors are copied to the host
only for checksums that a GPU cannot compute.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from slime.models.delta.blob import (
    BadBlob,
    Blob,
    ByteArray,
    ByteChanges,
    checksum_function,
    sum64_of_tensors,
)
from slime.models.delta.folder import (
    BadDelta,
    DeltaIndex,
    SafetensorsEntry,
    delta_entries,
    safetensors_entries,
)


def bytes_of(tensor: torch.Tensor) -> ByteArray:
    """The tensor's bytes on the host, little endian in C order: its own memory if contiguous and on the CPU, or a copy.

    Bytes of a GPU tensor are copied to pinned memory, which is several times as fast in both directions; torch keeps
    and reuses it.
    """
    tensor = tensor.detach().contiguous()
    if tensor.is_cuda:
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    array: ByteArray = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def put_bytes(target: torch.Tensor, data: ByteArray) -> None:
    """Write bytes back into a tensor; a no-op if `bytes_of` returned the tensor's own memory."""
    source = torch.from_numpy(data).view(target.dtype).view(target.shape)
    if source.data_ptr() != target.data_ptr():
        with torch.no_grad():
            target.copy_(source)


def bytes_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes on its device: its own memory if it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_checksums(tensors: Iterable[tuple[str, torch.Tensor]], kind: str = "xxh3-128") -> dict[str, str]:
    """The checksum of every tensor, by name; computed on the tensor's device if this kind of checksum allows it."""
    if kind == "sum64":
        known = dict(tensors)
        return dict(zip(known, sum64_of_tensors(list(known.values())), strict=True))
    function = checksum_function(kind)
    return {name: function(bytes_of(tensor)) for name, tensor in tensors}


_MAX_THREADS = 8
_MAX_UNPACKERS = 32


class ChecksumMismatch(BadDelta):
    """A tensor's checksum differs from the sender's: the weights here were not the base that the sender assumes."""


class PartiallyApplied(Exception):
    """Some tensors were changed and could not be restored."""


@contextmanager
def _rollback_on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the body raises, so that the body changes everything or nothing."""
    try:
        yield
    except BaseException as cause:
        try:
            undo()
        except Exception as worse:  # noqa: BLE001 - after any failure the old bytes are lost
            raise PartiallyApplied(f"{cause}; and the old bytes could not be put back: {worse}") from cause
        raise


def apply_to_tensors(targets: Mapping[str, torch.Tensor], entries: list[SafetensorsEntry], index: DeltaIndex) -> int:
    """Change all these tensors or none; returns the bytes of the blobs. Each entry's name is in `targets`."""
    if any(targets[entry.name].is_cuda for entry in entries):
        apply_on_device(targets, entries, index)
    else:
        _apply_on_host(targets, entries, index)
    return sum(entry.end - entry.start for entry in entries)


@torch.no_grad()
def apply_on_device(targets: Mapping[str, torch.Tensor], entries: list[SafetensorsEntry], index: DeltaIndex) -> None:
    """Change tensors on their own device; threads read and unpack all blobs before the first tensor changes."""

    def unpack(entry: SafetensorsEntry) -> ByteChanges:
        size = targets[entry.name].nbytes
        try:
            return Blob(entry.read(), index.encoding).byte_changes(size)
        except (OSError, BadDelta, BadBlob) as cause:
            raise BadDelta(f"the blob of {entry.name} {cause}") from cause

    with ThreadPoolExecutor(min(_MAX_UNPACKERS, os.cpu_count() or 1)) as pool:
        unpacked = pool.map(unpack, entries)
        changes = [(targets[entry.name], flips) for entry, flips in zip(entries, unpacked, strict=True)]
    undo: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def restore() -> None:
        for target, positions, before in reversed(undo):  # tensors may share memory
            _put(target, positions, before)

    with _rollback_on_failure(restore):
        for target, flips in changes:
            positions = torch.from_numpy(flips.positions).to(target.device)
            values = torch.from_numpy(flips.values.copy()).to(target.device)
            before = bytes_in_place(target)[positions]
            after = before ^ values if flips.is_xor else values
            undo.append((target, positions, before))
            _put(target, positions, after)
        found = tensor_checksums(((entry.name, targets[entry.name]) for entry in entries), index.checksum)
        for entry in entries:
            if found[entry.name] != entry.checksum:
                raise _checksum_mismatch(entry, found[entry.name])


def _put(target: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite bytes of a tensor in any memory layout."""
    data = bytes_in_place(target)
    data[positions] = values
    if data.data_ptr() != target.data_ptr():
        target.copy_(data.view(target.dtype).view(target.shape))


def _apply_on_host(targets: Mapping[str, torch.Tensor], entries: list[SafetensorsEntry], index: DeltaIndex) -> None:
    checksum = checksum_function(index.checksum)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        done = [(e, pool.submit(_apply_to_tensor, targets[e.name], e, index.encoding, checksum)) for e in entries]
    failures = [error for _, future in done if (error := future.exception()) is not None]

    def restore() -> None:
        for entry, future in done:
            if future.exception() is None:
                data = bytes_of(targets[entry.name])
                future.result().apply(data)
                put_bytes(targets[entry.name], data)

    if failures:
        with _rollback_on_failure(restore):
            raise next((one for one in failures if isinstance(one, PartiallyApplied)), failures[0])


def apply_to_files(folder: Path, delta: Path, index: DeltaIndex) -> None:
    """Change the tensors in a folder of safetensors files. On a failure the earlier tensors stay changed."""
    present = {
        entry.name: entry for path in sorted(folder.glob("*.safetensors")) for entry in safetensors_entries(path)
    }
    by_file: dict[Path, list[tuple[SafetensorsEntry, SafetensorsEntry]]] = {}
    for change in delta_entries(delta, index):
        if change.name not in present:
            raise BadDelta(f"there is no tensor {change.name}")
        by_file.setdefault(present[change.name].path, []).append((change, present[change.name]))
    checksum = checksum_function(index.checksum)
    for path, changes in by_file.items():
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)  # never closed: a propagating error still holds a view of its bytes
        data = np.frombuffer(mapped, np.uint8)
        for change, place in changes:
            _apply_entry(data[place.start : place.end], change, index.encoding, checksum)
        mapped.flush()


def _apply_entry(
    target: ByteArray, entry: SafetensorsEntry, encoding: str, checksum: Callable[[ByteArray], str]
) -> Blob:
    """Change the bytes of one tensor and return the blob that undoes the change."""
    try:
        undo = Blob(entry.read(), encoding).apply(target)
    except (OSError, BadDelta, BadBlob) as cause:
        raise BadDelta(f"the blob of {entry.name} {cause}") from cause
    with _rollback_on_failure(lambda: undo.apply(target)):
        if (found := checksum(target)) != entry.checksum:
            raise _checksum_mismatch(entry, found)
    return undo


def _checksum_mismatch(entry: SafetensorsEntry, found: str) -> ChecksumMismatch:
    return ChecksumMismatch(f"{entry.name} has checksum {found} after the delta and should have {entry.checksum}")


def _apply_to_tensor(
    target: torch.Tensor, entry: SafetensorsEntry, encoding: str, checksum: Callable[[ByteArray], str]
) -> Blob:
    data = bytes_of(target)
    undo = _apply_entry(data, entry, encoding, checksum)

    def restore() -> None:
        undo.apply(data)
        put_bytes(target, data)

    with _rollback_on_failure(restore):
        put_bytes(target, data)
    return undo
