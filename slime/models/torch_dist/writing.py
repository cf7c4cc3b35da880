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
from typing import BinaryIO

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
    with FolderDraft.begin(None, target) as draft:
        _ReleaseWriter(draft.staging / RELEASE, list(entries), dtype=dtype, alike=alike).write(sources)
        (draft.staging / LATEST).write_text(RELEASE)
        return draft.replace_target()


class _ReleaseWriter:
    """Writes the tensors, the index and the other files of one `release` folder."""

    def __init__(self, folder: Path, entries: list[ParameterEntry], *, dtype: torch.dtype, alike: bool) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._entries = [entry for entry in entries if not entry.is_copy]
        self._dtype = dtype
        names = [entry.megatron for entry in self._entries]
        layers, experts = count_rows(names)
        self._places = {name: place_to_write(name, layers=layers, experts=experts, alike=alike) for name in names}
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}
        self._file: BinaryIO | None = None
        self._files = 0

    def write(self, sources: Mapping[str, Source]) -> None:
        for entry in self._entries:
            self._add(self._places[entry.megatron], self._parameter(entry, sources))
        self._add_extra_states()
        if self._file is not None:
            self._close(self._file)
        index = Metadata(self._tensors, None, self._stored, StorageMeta(), CURRENT_DCP_VERSION)
        (self._folder / INDEX).write_bytes(pickle.dumps(index))
        torch.save(_COMMON, self._folder / "common.pt")
        (self._folder / "metadata.json").write_text(json.dumps(_FORMAT | _COMMON_FORMAT))
        for name in (INDEX, "common.pt", "metadata.json"):
            fsync_path(self._folder / name)
        fsync_path(self._folder)

    def _parameter(self, entry: ParameterEntry, sources: Mapping[str, Source]) -> Tensor:
        absent = next((name for name in entry.hf if name not in sources), None)
        if absent is not None:
            raise UserError(f"the model folder lacks {absent}, which {entry.megatron} needs: download it again")
        shard = entry.form.shard([sources[name].shape for name in entry.hf], 0, 1)
        parts = [sources[entry.hf[share.source]].read(share.region) for share in shard.shares]
        joined = shard.join(parts)
        return joined.to(self._dtype) if joined.is_floating_point() else joined

    def _add(self, place: CheckpointPlace, tensor: Tensor) -> None:
        rows, shape = place.rows, tuple(tensor.shape)
        whole = torch.Size((*rows, *shape))
        offset = torch.Size((*place.row, *(0 for _ in shape)))
        properties = TensorProperties(dtype=tensor.dtype)
        entry = self._tensors.setdefault(place.key, TensorStorageMetadata(properties, whole, []))
        assert isinstance(entry, TensorStorageMetadata)
        if entry.size != whole or entry.properties.dtype != tensor.dtype:
            raise UserError(f"{place.key} is {tuple(whole)} in one layer and {tuple(entry.size)} in another")
        size = torch.Size((*(1 for _ in rows), *shape))
        entry.chunks.append(ChunkStorageMetadata(offset, size))
        index = MetadataIndex(place.key, offset, len(entry.chunks) - 1)
        content = io.BytesIO()
        torch.save(tensor.reshape(size).contiguous().clone(), content)
        self._stored[index] = self._save_bytes(content.getbuffer())

    def _add_extra_states(self) -> None:
        """Add an empty extra state for every layer that computes: Megatron's layers request it by name."""
        nothing = io.BytesIO()
        torch.save([None], nothing)
        stored = self._save_bytes(nothing.getbuffer())
        for place in self._places.values():
            module = place.key.rpartition(".")[0]
            modules = [module]
            if module.endswith("self_attention.linear_proj"):
                modules.append(module.replace("linear_proj", "core_attention"))
            where, count = (place.row, place.rows) if place.rows else ((0,), (1,))
            shard = f"shard_{'.'.join(map(str, where))}_{'.'.join(map(str, count))}"
            for one in modules:
                self._tensors[f"{one}._extra_state/{shard}"] = BytesStorageMetadata()
                self._stored[MetadataIndex(f"{one}._extra_state/{shard}")] = stored

    def _save_bytes(self, content: memoryview) -> _StorageInfo:
        if self._file is not None and self._file.tell() + len(content) > FILE_BYTES:
            self._close(self._file)
            self._file = None
        if self._file is None:
            self._file = (self._folder / f"__0_{self._files}.distcp").open("wb")
            self._files += 1
        begin = self._file.tell()
        self._file.write(content)
        return _StorageInfo(Path(self._file.name).name, begin, len(content))

    def _close(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()
