"""A delta put to the weights it was made for: tensors in memory, or the files of a model folder.

Invariant: a tensor has exactly the sender's bytes afterwards, which its checksum shows, or is what it was before.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from slime.models.delta.blob import BadBlob, Blob, ByteArray, checksum_function
from slime.models.delta.folder import BadDelta, DeltaIndex, Entry, delta_entries, safetensors_entries
from slime.models.delta.tensors import bytes_of, put_bytes

_MAX_THREADS = 8


class WrongResult(BadDelta):
    """A tensor has another checksum than the sender's: the weights here were not what the sender takes them for."""


def apply_to_tensors(targets: Mapping[str, torch.Tensor], entries: list[Entry], index: DeltaIndex) -> int:
    """Change all these tensors or none; the bytes of the blobs. Each entry's name is in `targets`."""
    checksum = checksum_function(index.checksum)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        done = [(e, pool.submit(_apply_to_tensor, targets[e.name], e, index.encoding, checksum)) for e in entries]
    failures = [error for _, future in done if (error := future.exception()) is not None]
    if failures:
        _undo(targets, done)
        raise failures[0]
    return sum(entry.end - entry.start for entry in entries)


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
    if (found := checksum(target)) != entry.checksum:
        undo.apply(target)
        raise WrongResult(f"{entry.name} has checksum {found} after the delta and should have {entry.checksum}")
    return undo


def _apply_to_tensor(target: torch.Tensor, entry: Entry, encoding: str, checksum: Callable[[ByteArray], str]) -> Blob:
    data = bytes_of(target)
    undo = _apply_entry(data, entry, encoding, checksum)
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
