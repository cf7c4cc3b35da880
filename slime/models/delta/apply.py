"""A delta put to the weights it was made for: tensors in memory, or the files of a model folder.

Invariant: all tensors have exactly the sender's bytes afterwards, which their checksums show, or are what they were
before, whatever fails on the way; where not even the old bytes can be put back, that is `HalfApplied`. Of tensors on a
GPU only what changes travels there; they come to the host for checksums that a GPU cannot compute.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from slime.models.delta.blob import BadBlob, Blob, ByteArray, Flips, checksum_function, sum64_of_tensors
from slime.models.delta.folder import BadDelta, DeltaIndex, Entry, delta_entries, safetensors_entries

# A tensor as the bytes that deltas and checksums are made of: little endian, C order.


def bytes_of(tensor: torch.Tensor) -> ByteArray:
    """The bytes on the host: the tensor's own memory if it is contiguous and on the CPU, else a copy.

    From a GPU they come into pinned memory, in both directions several times as fast; torch keeps and reuses it.
    """
    tensor = tensor.detach().contiguous()
    if tensor.is_cuda:
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    array: ByteArray = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def put_bytes(target: torch.Tensor, data: ByteArray) -> None:
    """Put bytes back; where `bytes_of` gave the tensor's own memory they are there already."""
    source = torch.from_numpy(data).view(target.dtype).view(target.shape)
    if source.data_ptr() != target.data_ptr():
        with torch.no_grad():
            target.copy_(source)


def bytes_in_place(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes where they are: the tensor's own memory if it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_checksums(tensors: Iterable[tuple[str, torch.Tensor]], kind: str = "xxh3-128") -> dict[str, str]:
    """The checksum of every tensor, by name; on the device that it is on, if its kind can be computed there."""
    if kind == "sum64":
        known = dict(tensors)
        return dict(zip(known, sum64_of_tensors(list(known.values())), strict=True))
    function = checksum_function(kind)
    return {name: function(bytes_of(tensor)) for name, tensor in tensors}


_MAX_THREADS = 8
_MAX_UNPACKERS = 32


class WrongResult(BadDelta):
    """A tensor has another checksum than the sender's: the weights here were not what the sender takes them for."""


class HalfApplied(Exception):
    """Some tensors were changed and could not be changed back."""


@contextmanager
def _undone_on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """The body changes all or, where it raises and `undo` works, nothing."""
    try:
        yield
    except BaseException as cause:
        try:
            undo()
        except Exception as worse:  # noqa: BLE001 - whatever it is, the old bytes are lost
            raise HalfApplied(f"{cause}; and the old bytes could not be put back: {worse}") from cause
        raise


def apply_to_tensors(targets: Mapping[str, torch.Tensor], entries: list[Entry], index: DeltaIndex) -> int:
    """Change all these tensors or none; the bytes of the blobs. Each entry's name is in `targets`."""
    if any(targets[entry.name].is_cuda for entry in entries):
        apply_on_device(targets, entries, index)
    else:
        _apply_on_host(targets, entries, index)
    return sum(entry.end - entry.start for entry in entries)


@torch.no_grad()
def apply_on_device(targets: Mapping[str, torch.Tensor], entries: list[Entry], index: DeltaIndex) -> None:
    """The same where the tensors are; blobs are read and unpacked by threads before the first tensor changes."""
    with ThreadPoolExecutor(min(_MAX_UNPACKERS, os.cpu_count() or 1)) as pool:
        unpacked = pool.map(lambda entry: _flips(entry, targets[entry.name].nbytes, index.encoding), entries)
        changes = [(targets[entry.name], flips) for entry, flips in zip(entries, unpacked, strict=True)]
    undo: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def restore() -> None:
        for target, positions, before in reversed(undo):  # tensors may share memory
            _put(target, positions, before)

    with _undone_on_failure(restore):
        for target, flips in changes:
            positions, before, after = _flipped(target, flips)
            undo.append((target, positions, before))
            _put(target, positions, after)
        found = tensor_checksums(((entry.name, targets[entry.name]) for entry in entries), index.checksum)
        for entry in entries:
            if found[entry.name] != entry.checksum:
                raise _wrong(entry, found[entry.name])


def _flips(entry: Entry, size: int, encoding: str) -> Flips:
    try:
        return Blob(entry.read(), encoding).flips(size)
    except (OSError, BadDelta, BadBlob) as cause:
        raise BadDelta(f"the blob of {entry.name} {cause}") from cause


def _flipped(target: torch.Tensor, flips: Flips) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of a tensor that change: where, what they are, and what they become."""
    positions = torch.from_numpy(flips.positions).to(target.device)
    values = torch.from_numpy(flips.values.copy()).to(target.device)
    before = bytes_in_place(target)[positions]
    return positions, before, before ^ values if flips.is_xor else values


def _put(target: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite bytes of a tensor, whatever order it is stored in."""
    data = bytes_in_place(target)
    data[positions] = values
    if data.data_ptr() != target.data_ptr():
        target.copy_(data.view(target.dtype).view(target.shape))


def _apply_on_host(targets: Mapping[str, torch.Tensor], entries: list[Entry], index: DeltaIndex) -> None:
    checksum = checksum_function(index.checksum)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        done = [(e, pool.submit(_apply_to_tensor, targets[e.name], e, index.encoding, checksum)) for e in entries]
    failures = [error for _, future in done if (error := future.exception()) is not None]
    if failures:
        with _undone_on_failure(lambda: _undo(targets, done)):
            raise next((one for one in failures if isinstance(one, HalfApplied)), failures[0])


def apply_to_files(folder: Path, delta: Path, index: DeltaIndex) -> None:
    """Change the tensors in a folder of safetensors files. A failure leaves those before it changed."""
    present = {
        entry.name: entry for path in sorted(folder.glob("*.safetensors")) for entry in safetensors_entries(path)
    }
    by_file: dict[Path, list[tuple[Entry, Entry]]] = {}
    for change in delta_entries(delta, index):
        if change.name not in present:
            raise BadDelta(f"there is no tensor {change.name}")
        by_file.setdefault(present[change.name].path, []).append((change, present[change.name]))
    for path, changes in by_file.items():
        _patch(path, changes, index)


def _apply_entry(target: ByteArray, entry: Entry, encoding: str, checksum: Callable[[ByteArray], str]) -> Blob:
    """Change the bytes of one tensor and return what undoes it."""
    try:
        undo = Blob(entry.read(), encoding).apply(target)
    except (OSError, BadDelta, BadBlob) as cause:
        raise BadDelta(f"the blob of {entry.name} {cause}") from cause
    with _undone_on_failure(lambda: undo.apply(target)):
        if (found := checksum(target)) != entry.checksum:
            raise _wrong(entry, found)
    return undo


def _wrong(entry: Entry, found: str) -> WrongResult:
    return WrongResult(f"{entry.name} has checksum {found} after the delta and should have {entry.checksum}")


def _apply_to_tensor(target: torch.Tensor, entry: Entry, encoding: str, checksum: Callable[[ByteArray], str]) -> Blob:
    data = bytes_of(target)
    undo = _apply_entry(data, entry, encoding, checksum)

    def restore() -> None:
        undo.apply(data)
        put_bytes(target, data)

    with _undone_on_failure(restore):
        put_bytes(target, data)
    return undo


def _undo(targets: Mapping[str, torch.Tensor], done: list[tuple[Entry, Future[Blob]]]) -> None:
    for entry, future in done:
        if future.exception() is None:
            data = bytes_of(targets[entry.name])
            future.result().apply(data)
            put_bytes(targets[entry.name], data)


def _patch(path: Path, changes: list[tuple[Entry, Entry]], index: DeltaIndex) -> None:
    """Change tensors of one file through a mapping, and write it through. Nobody closes the mapping by hand: an error
    that is on its way still holds the bytes it is about."""
    checksum = checksum_function(index.checksum)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    data = np.frombuffer(mapped, np.uint8)
    for change, place in changes:
        _apply_entry(data[place.start : place.end], change, index.encoding, checksum)
    mapped.flush()
