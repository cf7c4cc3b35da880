"""Reads distributed checkpoints: the index of tensor blocks, their numbers, and the tensor of a Megatron parameter.

    <folder>/.metadata       a pickle: shapes, types and blocks of the tensors, and the file position of each block
             __0_0.distcp    blocks, each as torch.save writes a tensor
             common.pt       everything that is not a tensor; never opened

Invariant: nothing that a pickle names is called. Only the classes of an index are accepted, and each is replaced by a
passive record of its state. All values of the records are checked before a file is opened.

A region is read only from the blocks that it touches. A block is read as numbers only (`weights_only`); one that is
truncated, or whose shape differs from the index, is a `UserError`.

Megatron stores a parameter under one of these names; L is the number of layers, E the number of experts:

    decoder.layers.self_attention.linear_qkv.weight [L, ...]        layers of one kind: one tensor with a row for each
    decoder.layers.3.self_attention.linear_qkv.weight               layers of several kinds: one tensor for each
    decoder.layers.3.mlp.experts.experts.linear_fc1.weight [E, ...] the experts of a layer
    ..._w, ..._v; .query, .key, ...                                 parts that are sharded over tensor-parallel ranks

Invariant: names are global (layers count over the pipeline, experts over expert-parallel ranks), and a tensor is the
parameter as a single tensor-parallel rank would have it.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.errors import UserError
from slime.models.families.tp_sharding import Region, region_overlap, region_shape, relative_region
from slime.models.tensor_sources import DerivedSource, Source, concatenated_source, row_source

INDEX = ".metadata"
LARGEST_INDEX = 2**32

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_INDEX_CLASSES = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_CHECKPOINT}.planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    _SHARDED: {"MEM_FORMAT_ENCODING", "TensorProperties"},
    _MEGATRON: {"MCoreMetadata", "MCoreSavePlan"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


class _Record:
    """A passive replacement of an object in an index; `said` is its state in the file."""

    said: Any = None

    def __init__(self, *values: object) -> None:
        self.said = values

    def __setstate__(self, state: object) -> None:
        self.said = state

    def __getitem__(self, name: str) -> Any:
        return self.said[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name in _INDEX_CLASSES.get(module, ()):
            return type(name, (_Record,), {})
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")


@dataclass(frozen=True)
class CheckpointBlock:
    """A block of a tensor: its offset and size in the tensor, and the range of its bytes in a file."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    path: Path
    begin: int
    length: int


@dataclass(frozen=True)
class IndexedTensor:
    """One tensor of a checkpoint, by its index."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[CheckpointBlock, ...]


def read_index(folder: Path) -> dict[str, IndexedTensor]:
    """Read the index of a checkpoint: all tensors by key; `UserError` if it is invalid or names other classes."""
    path = folder / INDEX
    try:
        if path.stat().st_size > LARGEST_INDEX:
            raise ValueError(f"it has more than {LARGEST_INDEX} bytes")
        found = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        places: dict[object, Any] = {}
        for index, info in found["storage_data"].items():
            offset = index.said.get("offset")
            where = (index["fqn"], None if offset is None else _check_sizes(offset))
            places[where] = info.said
        return {
            key: _check_entry(folder, key, entry.said, places)
            for key, entry in found["state_dict_metadata"].items()
            if type(entry).__name__ == "TensorStorageMetadata"
        }
    except OSError as cause:
        raise UserError(f"{path} cannot be read: {cause.strerror}") from cause
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        EOFError,
        RuntimeError,
        OverflowError,
    ) as cause:
        raise UserError(f"{path} is not an index of a torch_dist checkpoint ({cause}): choose another one") from cause


def _check_sizes(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} are not sizes")
    return numbers


def _check_entry(folder: Path, key: str, entry: dict[str, Any], places: dict[object, Any]) -> IndexedTensor:
    """Check the entry of one tensor and locate its blocks."""
    shape = _check_sizes(entry["size"])
    properties = entry["properties"].said
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} has an unknown dtype")
    blocks = []
    for chunk in entry["chunks"]:
        offset, size = _check_sizes(chunk["offsets"]), _check_sizes(chunk["sizes"])
        inside = len(shape) == len(offset) == len(size)
        if not inside or any(a + b > c for a, b, c in zip(offset, size, shape, strict=True)):
            raise ValueError(f"{key} of shape {shape} has a block of {size} at {offset}, which is outside")
        place = places[key, offset]
        name = place["relative_path"]
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{key} has a block outside the folder")
        if place.get("transform_descriptors"):
            raise ValueError(f"{key} is compressed")
        begin, length = _check_sizes((place["offset"], place["length"]))
        blocks.append(CheckpointBlock(offset, size, folder / name, begin, length))
    if sum(math.prod(block.size) for block in blocks) != math.prod(shape):
        raise ValueError(f"the blocks of {key} do not cover its shape {shape}")
    return IndexedTensor(shape, dtype, tuple(blocks))


class TorchDist:
    """A distributed checkpoint: one `iter_...` or `release` folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors = read_index(folder)

    @property
    def keys(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def source(self, key: str) -> Source:
        """A source for one of its tensors, which is stored in blocks."""
        indexed = self._tensors[key]

        def read(region: Region) -> Tensor:
            result, filled = torch.empty(region_shape(region), dtype=indexed.dtype), 0
            for block in indexed.blocks:
                held = tuple(slice(begin, begin + size) for begin, size in zip(block.offset, block.size, strict=True))
                common = region_overlap(held, region)
                if common is not None:
                    loaded = _load_block(key, block, indexed.dtype)
                    result[relative_region(common, region)] = loaded[relative_region(common, held)]
                    filled += math.prod(region_shape(common))
            if filled != result.numel():
                raise UserError(f"the checkpoint has {filled} of {result.numel()} numbers of {key}: choose another")
            return result

        return DerivedSource(indexed.shape, indexed.dtype, read)


def _load_block(key: str, block: CheckpointBlock, dtype: torch.dtype) -> Tensor:
    try:
        with block.path.open("rb") as file:
            file.seek(block.begin)
            raw = file.read(block.length)
    except OSError as cause:
        raise UserError(f"{block.path} cannot be read: {cause.strerror}") from cause
    if len(raw) < block.length:
        raise UserError(f"{block.path} ends before {key} does: copy the checkpoint again")
    try:
        found = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as cause:
        raise UserError(f"{key} in {block.path} is not a tensor: the checkpoint is damaged") from cause
    if not isinstance(found, Tensor) or tuple(found.shape) != block.size or found.dtype != dtype:
        raise UserError(f"{key} in {block.path} is not what the index says: the checkpoint is damaged")
    return found


_LAYER = re.compile(r"^(.*?layers\.)(\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.*mlp\.experts\.)(linear_fc\d)\.(weight|bias)(\d+)$")
_PIECES = (
    ("_w", "_v"),
    (".query", ".key", ".value", ".z", ".beta", ".alpha"),
    (".query", ".key", ".value"),
)


@dataclass(frozen=True)
class CheckpointPlace:
    """A tensor of a checkpoint, and the index of the row (along one or two dimensions) that is a parameter."""

    key: str
    row: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    """Number of rows along each of these dimensions; set only for writing."""


def find_parameter(checkpoint: TorchDist, name: str) -> Source | None:
    """The source of a parameter; None if the checkpoint does not have it."""
    for place in _candidate_places(name):
        for suffixes in (("",), *_PIECES):
            if all(place.key + suffix in checkpoint for suffix in suffixes):
                found = [checkpoint.source(place.key + suffix) for suffix in suffixes]
                if any(len(one.shape) < len(place.row) for one in found):
                    continue
                if any(number >= size for one in found for number, size in zip(place.row, one.shape, strict=False)):
                    continue
                rows = [row_source(one, place.row) if place.row else one for one in found]
                return rows[0] if len(rows) == 1 else concatenated_source(rows, 0)
    return None


def place_to_write(name: str, *, layers: int, experts: int, alike: bool) -> CheckpointPlace:
    """The place where Megatron looks for a parameter; `alike`: all layers are of one kind."""
    plain, stacked = _layer_places(name)
    place = stacked if alike and stacked is not None else plain
    rows = (layers,) * len(place.row)
    expert = _EXPERT.match(place.key)
    if expert is None:
        return replace(place, rows=rows)
    return CheckpointPlace(
        f"{expert[1]}experts.{expert[2]}.{expert[3]}", (*place.row, int(expert[4])), (*rows, experts)
    )


def count_rows(names: Iterable[str]) -> tuple[int, int]:
    """Count the layers and the experts to which parameters belong."""
    layers, experts = 0, 0
    for name in names:
        if (layer := _LAYER.match(name)) is not None:
            layers = max(layers, int(layer[2]) + 1)
        if (expert := _EXPERT.match(name)) is not None:
            experts = max(experts, int(expert[4]) + 1)
    return layers, experts


def _candidate_places(name: str) -> Iterator[CheckpointPlace]:
    """The places where a parameter may be stored."""
    for place in _layer_places(name):
        if place is None:
            continue
        expert = _EXPERT.match(place.key)
        if expert is None:
            yield place
            continue
        tail = f"{expert[2]}.{expert[3]}"
        yield CheckpointPlace(f"{expert[1]}experts.{tail}", (*place.row, int(expert[4])))
        yield CheckpointPlace(f"{expert[1]}experts.{expert[4]}.{tail}", place.row)


def _layer_places(name: str) -> tuple[CheckpointPlace, CheckpointPlace | None]:
    """The places of a parameter as a tensor of its own, and as a row of a tensor of all layers."""
    layer = _LAYER.match(name)
    return CheckpointPlace(name), None if layer is None else CheckpointPlace(layer[1] + layer[3], (int(layer[2]),))
