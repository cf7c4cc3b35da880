"""Reads the tensors of a model folder straight into the memory of the model.

Several threads read pieces of the safetensors files, each into pinned memory of its own, and copy them to the device
while they read the next ones: a gigabyte that the system has in memory takes a fraction of a second.
Invariant: a tensor that `read_into` filled holds the values of the file, rounded if the tensor has another dtype. Files
are described by their headers alone; for a folder that these do not describe, `list_folder_tensors` returns None.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from slime.cluster.devices import cpu_cores
from slime.errors import UserError
from slime.models.safetensors_io import StoredTensor, stored_tensors

_PIECE = 1 << 22
_MOST_THREADS = 8
_BUFFERS = 2  # one is filled while the other is copied to the device
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def list_folder_tensors(folder: Path) -> dict[str, StoredTensor] | None:
    """List the tensors of a folder by name; None if it has other than floating-point tensors in safetensors files."""
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names: dict[str, str] | None = json.loads(index.read_text())["weight_map"]
            files = sorted(set(names.values())) if names else []
        else:
            names, files = None, ["model.safetensors"]
        listed = [stored for file in files for stored in stored_tensors([folder / file]).values()]
        found = {one.name: one for one in listed if names is None or folder / names.get(one.name, "") == one.path}
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_whole = names is None or found.keys() == names.keys()
    return found if is_whole and all(one.dtype in _FLOATS for one in listed) else None


def read_into(targets: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> int:
    """Fill each target from the tensor of its name; returns the bytes read.

    Targets are contiguous and on one device.
    """
    files = sorted({stored[name].path for name in targets})
    device = next(iter(targets.values())).device
    opened: dict[Path, int] = {}
    try:
        for file in files:
            opened[file] = os.open(file, os.O_RDONLY)
        pieces: queue.SimpleQueue[_FilePiece] = queue.SimpleQueue()
        for name, target in targets.items():
            tensor, flat = stored[name], target.detach().view(-1)
            step = _PIECE // tensor.dtype.itemsize
            for first in range(0, flat.numel(), step):
                begin = tensor.begin + first * tensor.dtype.itemsize
                pieces.put(_FilePiece(opened[tensor.path], begin, flat[first : first + step], tensor.dtype))
        threads = min(_MOST_THREADS, cpu_cores())
        with ThreadPoolExecutor(threads) as pool:
            readers = [pool.submit(_read_pieces, pieces, device) for _ in range(threads)]
            return sum(reader.result() for reader in readers)
    except OSError as cause:
        raise UserError(f"the weights in {files[0].parent} cannot be loaded: {cause}") from cause
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


class _FilePiece(NamedTuple):
    descriptor: int
    begin: int
    target: torch.Tensor  # flat
    dtype: torch.dtype  # in the file


@torch.inference_mode()
def _read_pieces(pieces: queue.SimpleQueue[_FilePiece], device: torch.device) -> int:
    """Read pieces until none is left; returns the bytes read."""
    cuda = device.type == "cuda"
    stream = torch.cuda.Stream(device) if cuda else None
    buffers = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=cuda) for _ in range(_BUFFERS)]
    taken: list[torch.cuda.Event | None] = [None] * _BUFFERS
    read = 0
    with torch.cuda.stream(stream):
        for at in itertools.cycle(range(_BUFFERS)):
            try:
                piece = pieces.get_nowait()
            except queue.Empty:
                break
            if (event := taken[at]) is not None:
                event.synchronize()
            size = piece.target.numel() * piece.dtype.itemsize
            buffer = buffers[at][:size]
            _fill(buffer.numpy(), piece.descriptor, piece.begin)
            values = buffer.view(piece.dtype)
            if piece.dtype != piece.target.dtype:  # copied to the device first, which rounds
                values = values.to(device, non_blocking=True)
            piece.target.copy_(values, non_blocking=True)
            read += size
            if stream is not None:
                taken[at] = torch.cuda.Event()
                taken[at].record(stream)  # type: ignore[union-attr]
    if stream is not None:
        stream.synchronize()
    return read


def _fill(buffer: np.ndarray, descriptor: int, begin: int) -> None:
    view, done = memoryview(buffer.data), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], begin + done)
        if not count:
            raise OSError("a file is shorter than its header says")
        done += count
