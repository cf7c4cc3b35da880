"""The index of a distributed checkpoint: which block of which tensor lies where in which file.

    <folder>/.metadata       a pickle: shapes, types and blocks of the tensors, and where each block begins
             __0_0.distcp    blocks, each as torch.save writes a tensor
             common.pt       what is no tensor; never opened

Invariant: nothing that a pickle names is called. Of its classes only those of an index are let in, and none of them as
itself: each becomes a record of what the file says. Everything the records say is checked before a file is opened.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.errors import UserError

INDEX = ".metadata"
LARGEST_INDEX = 2**32

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_RECORDS = {
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
    """Stands for an object of an index; `said` is what the file has of it."""

    said: Any = None

    def __init__(self, *values: Any) -> None:
        self.said = values

    def __setstate__(self, state: Any) -> None:
        self.said = state

    def __getitem__(self, name: str) -> Any:
        return self.said[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return type(name, (_Record,), {})
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")


@dataclass(frozen=True)
class Block:
    """A block of a tensor: where it stands in it, and where its bytes are."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    path: Path
    begin: int
    length: int


@dataclass(frozen=True)
class Indexed:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[Block, ...]


def read_index(folder: Path) -> dict[str, Indexed]:
    """All tensors of a checkpoint by key; what is not understood, or names anything else, is a `UserError`."""
    path = folder / INDEX
    try:
        if path.stat().st_size > LARGEST_INDEX:
            raise ValueError(f"it has more than {LARGEST_INDEX} bytes")
        found = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        places = {_key(index): info.said for index, info in found["storage_data"].items()}
        return {
            key: _indexed(folder, key, entry.said, places)
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
        raise UserError(f"{path} is no index of a torch_dist checkpoint ({cause}): choose another one") from cause


def _key(index: _Record) -> tuple[str, tuple[int, ...] | None]:
    offset = index.said.get("offset")
    return index["fqn"], None if offset is None else _numbers(offset)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} are not sizes")
    return numbers


def _indexed(folder: Path, key: str, entry: dict[str, Any], places: dict[Any, Any]) -> Indexed:
    shape = _numbers(entry["size"])
    properties = entry["properties"].said
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{key} is of no known type")
    blocks = []
    for chunk in entry["chunks"]:
        offset, size = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
        inside = len(shape) == len(offset) == len(size)
        if not inside or any(a + b > c for a, b, c in zip(offset, size, shape, strict=True)):
            raise ValueError(f"{key} of the shape {shape} has no block of {size} at {offset}")
        blocks.append(_block(folder, key, offset, size, places[key, offset]))
    if sum(math.prod(block.size) for block in blocks) != math.prod(shape):
        raise ValueError(f"the blocks of {key} do not make a tensor of the shape {shape}")
    return Indexed(shape, dtype, tuple(blocks))


def _block(folder: Path, key: str, offset: tuple[int, ...], size: tuple[int, ...], place: dict[str, Any]) -> Block:
    name = place["relative_path"]
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{key} is said to be outside the folder")
    if place.get("transform_descriptors"):
        raise ValueError(f"{key} is compressed")
    begin, length = _numbers((place["offset"], place["length"]))
    return Block(offset, size, folder / name, begin, length)
