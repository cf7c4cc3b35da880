"""Writes a model folder's weights as a distributed checkpoint that Megatron loads in any layout.

    <target>/latest_checkpointed_iteration.txt   `release`
             release/.metadata, __0_0.distcp ... the tensors, one block for each parameter
             release/common.pt, metadata.json    other files that Megatron requires

Invariant: one parameter at a time is in memory. The target is either the old folder or the complete new one.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from slime.errors import UserError
from slime.models.families.weight_map import ParameterEntry
from slime.models.saving import FolderDraft
from slime.models.tensor_sources import Source
from slime.models.torch_dist.index import INDEX, CheckpointPlace, count_rows, place_to_write
from slime.storage.files import fsync_path

FILE_BYTES = 5 * 1000**3
RELEASE = "release"
LATEST = "latest_checkpointed_iteration.txt"
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_FORMAT = {"common_backend": "torch", "common_backend_version": 1}
_COMMON = {"checkpoint_version": 3.0, "iteration": 0}


def write_release(
    sources: Mapping[str, Source], entries: Iterable[ParameterEntry], target: Path, *, dtype: torch.dtype, alike: bool
) -> Path:
    """Write the parameters of `entries` in `dtype`, from a folder's tensors; `alike`: all layers are of one kind."""
    own = [entry for entry in entries if not entry.is_copy]
    layers, experts = count_rows([entry.megatron for entry in own])
    places = {
        entry.megatron: place_to_write(entry.megatron, layers=layers, experts=experts, alike=alike) for entry in own
    }
    with FolderDraft.begin(None, target) as draft:
        folder = draft.staging / RELEASE
        folder.mkdir()
        with _BlockWriter(folder) as writer:
            for entry in own:
                absent = next((name for name in entry.hf if name not in sources), None)
                if absent is not None:
                    raise UserError(f"the model folder lacks {absent}, which {entry.megatron} needs: download it again")
                shard = entry.form.shard([sources[name].shape for name in entry.hf], 0, 1)
                joined = shard.join([sources[entry.hf[share.source]].read(share.region) for share in shard.shares])
                writer.add(places[entry.megatron], joined.to(dtype) if joined.is_floating_point() else joined)
            writer.add_extra_states(places.values())
        index = Metadata(writer.tensors, None, writer.stored, StorageMeta(), CURRENT_DCP_VERSION)
        (folder / INDEX).write_bytes(pickle.dumps(index))
        torch.save(_COMMON, folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps(_FORMAT | _COMMON_FORMAT))
        for name in (INDEX, "common.pt", "metadata.json"):
            fsync_path(folder / name)
        fsync_path(folder)
        (draft.staging / LATEST).write_text(RELEASE)
        return draft.replace_target()


class _BlockWriter:
    """Writes blocks into the files of one `release` folder, each file synced to disk; `tensors` and `stored` are the
    entries of its index."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self.stored: dict[MetadataIndex, _StorageInfo] = {}
        self._folder = folder
        self._file: BinaryIO | None = None
        self._files = 0

    def add(self, place: CheckpointPlace, tensor: Tensor) -> None:
        rows, shape = place.rows, tuple(tensor.shape)
        whole = torch.Size((*rows, *shape))
        offset = torch.Size((*place.row, *(0 for _ in shape)))
        properties = TensorProperties(dtype=tensor.dtype)
        entry = self.tensors.setdefault(place.key, TensorStorageMetadata(properties, whole, []))
        assert isinstance(entry, TensorStorageMetadata)
        if entry.size != whole or entry.properties.dtype != tensor.dtype:
            raise UserError(f"{place.key} is {tuple(whole)} in one layer and {tuple(entry.size)} in another")
        size = torch.Size((*(1 for _ in rows), *shape))
        entry.chunks.append(ChunkStorageMetadata(offset, size))
        index = MetadataIndex(place.key, offset, len(entry.chunks) - 1)
        self.stored[index] = self._save(tensor.reshape(size).contiguous().clone())

    def add_extra_states(self, places: Iterable[CheckpointPlace]) -> None:
        """Add an empty extra state for every layer that computes: Megatron's layers request it by name."""
        stored = self._save([None])
        for place in places:
            module = place.key.rpartition(".")[0]
            modules = [module]
            if module.endswith("self_attention.linear_proj"):
                modules.append(module.replace("linear_proj", "core_attention"))
            where, count = (place.row, place.rows) if place.rows else ((0,), (1,))
            shard = f"shard_{'.'.join(map(str, where))}_{'.'.join(map(str, count))}"
            for one in modules:
                self.tensors[f"{one}._extra_state/{shard}"] = BytesStorageMetadata()
                self.stored[MetadataIndex(f"{one}._extra_state/{shard}")] = stored

    def _save(self, value: object) -> _StorageInfo:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        content = buffer.getbuffer()
        if self._file is not None and self._file.tell() + len(content) > FILE_BYTES:
            self._close()
        if self._file is None:
            self._file = (self._folder / f"__0_{self._files}.distcp").open("wb")
            self._files += 1
        begin = self._file.tell()
        self._file.write(content)
        return _StorageInfo(Path(self._file.name).name, begin, len(content))

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._close()
