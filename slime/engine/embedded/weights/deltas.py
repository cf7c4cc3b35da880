"""A delta of the weights, applied in place.

Invariant: whole or not at all. The version it applies to is compared first; a blob that is damaged, or a tensor whose
checksum is wrong afterwards, undoes what was applied before it, byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from slime.engine.embedded.sampling_params import BadRequest
from slime.engine.embedded.weights.loading import Conflict
from slime.engine.embedded.weights.views import FolderViews
from slime.models.delta_folder import BadDelta, DeltaIndex, Entry, delta_entries
from slime.models.deltas import BadBlob, Blob, ByteArray, checksum_function
from slime.models.tensor_bytes import bytes_of

_MAX_THREADS = 8


class DifferentWeights(BadRequest):
    """The result has another checksum than the sender's: the weights here were not what it takes them for."""


def apply_delta(views: FolderViews, folder: Path, index: DeltaIndex, *, version: str) -> int:
    """Bring the model from `version` to the delta's; the bytes of its blobs."""
    if str(index.base_version) != version:
        raise Conflict(f"{folder.name} applies to version {index.base_version} and this engine has version {version}")
    try:
        entries = list(delta_entries(folder, index))
    except (OSError, BadDelta) as cause:
        raise BadRequest(f"cannot read the delta: {cause}") from cause
    targets = views.targets(index.weight_map.keys())
    for entry in entries:
        if entry.name not in targets:
            raise BadRequest(f"{folder} changes a tensor {entry.name!r} that this model does not have on its own")
    checksum = checksum_function(index.checksum)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        done = [(e, pool.submit(_apply, targets[e.name], e, index.encoding, checksum)) for e in entries]
    failures = [error for _, future in done if (error := future.exception()) is not None]
    if failures:
        _undo(targets, done)
        raise failures[0]
    return sum(entry.end - entry.start for entry in entries)


def weight_checksums(views: FolderViews, kind: str = "xxh3-128") -> dict[str, str]:
    """The checksum of every tensor under its own name and the folder's."""
    function = checksum_function(kind)
    return {name: function(bytes_of(tensor)) for name, tensor in views.readable().items()}


def _apply(target: torch.Tensor, entry: Entry, encoding: str, checksum: Callable[[ByteArray], str]) -> Blob:
    """Change one tensor and return what undoes it; a tensor that cannot be changed is left as it was."""
    new = bytes_of(target)
    try:
        undo = Blob(entry.read(), encoding).apply(new)
    except (OSError, BadDelta, BadBlob) as cause:
        raise BadRequest(f"the blob of {entry.name} {cause}") from cause
    if (found := checksum(new)) != entry.checksum:
        undo.apply(new)
        raise DifferentWeights(f"{entry.name} has checksum {found} after the delta and should have {entry.checksum}")
    _write(target, new)
    return undo


def _undo(targets: dict[str, torch.Tensor], done: list[tuple[Entry, Future[Blob]]]) -> None:
    for entry, future in done:
        if future.exception() is None:
            old = bytes_of(targets[entry.name])
            future.result().apply(old)
            _write(targets[entry.name], old)


def _write(target: torch.Tensor, data: ByteArray) -> None:
    """Put bytes back; on the CPU `bytes_of` gave the tensor's own memory, and they are there already."""
    source = torch.from_numpy(data).view(target.dtype).view(target.shape)
    if source.data_ptr() != target.data_ptr():
        with torch.no_grad():
            target.copy_(source)
