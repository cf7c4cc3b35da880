"""Stream named tensors into size-bounded safetensors files.

Invariant: at most one shard of tensors is held in memory, every name is written exactly once, and a file is complete
(and, unless `sync` is off, on disk) before its path is returned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slime.storage.files import fsync_path

NOTES = "notes"
"""In the header of a file: what was noted of its tensors, as JSON."""

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def iter_named(tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(tensors.items()) if isinstance(tensors, Mapping) else iter(tensors)


class ShardWriter:
    """Collects tensors and writes `{prefix}-{i:05d}.safetensors` whenever `max_bytes` would be passed."""

    def __init__(
        self, folder: Path, *, prefix: str, max_bytes: int, dtype: torch.dtype | None, sync: bool = True
    ) -> None:
        self.folder = folder
        self.prefix = prefix
        self.max_bytes = max_bytes
        self.dtype = dtype
        self.sync = sync
        self.paths: list[Path] = []
        self.weight_map: dict[str, str] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._notes: dict[str, Any] = {}
        self._pending_bytes = 0

    def add(self, name: str, tensor: torch.Tensor, *, note: Any = None) -> None:
        """Take a tensor, and what the header is to say of it; `tensor` may change as soon as this returns."""
        if name in self.weight_map or name in self._pending:
            raise ValueError(f"tensor {name} was given twice")
        target = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        ready = tensor.detach().to(target).to("cpu").contiguous()
        if ready.untyped_storage().nbytes() != ready.nbytes or ready.data_ptr() == tensor.data_ptr():
            ready = ready.clone()
        if self._pending and self._pending_bytes + ready.nbytes > self.max_bytes:
            self._write()
        self._pending[name] = ready
        self._pending_bytes += ready.nbytes
        if note is not None:
            self._notes[name] = note

    def finish(self) -> list[Path]:
        if self._pending or not self.paths:
            self._write()
        return self.paths

    def _write(self) -> None:
        path = self.folder / f"{self.prefix}-{len(self.paths) + 1:05d}.safetensors"
        noted = {NOTES: json.dumps(self._notes)} if self._notes else {}
        save_file(self._pending, path, metadata={"format": "pt"} | noted)
        if self.sync:
            fsync_path(path)
        self.weight_map.update(dict.fromkeys(self._pending, path.name))
        self.paths.append(path)
        self._pending, self._notes = {}, {}
        self._pending_bytes = 0


def write_index(path: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """The `model.safetensors.index.json` that Hugging Face readers expect beside several shards."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(index, indent=2))
    fsync_path(path)
