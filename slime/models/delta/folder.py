"""Delta folders: safetensors files of blobs, and an index that names the base version that they apply to.

    model-{i:05d}-of-{n:05d}.safetensors   name -> 1-D uint8 blob; `__metadata__`: name -> checksum of the new tensor
    model.safetensors.index.json           metadata {version, base_version, delta_encoding, ...} and weight_map

Invariant: `read_index` returns a delta's index, or None for a folder of whole weights; a returned index has every
field, and its files are in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from slime.models.folder import read_safetensors_header
from slime.storage.files import fsync_path
from slime.storage.json_types import JsonObject

INDEX_NAME = "model.safetensors.index.json"
COMPRESSION = "zstd"
ENCODINGS = ("xor", "overwrite", "sparse")


class BadDelta(ValueError):
    """A folder that is not a delta of this format."""


class BaseMismatch(BadDelta):
    """A delta whose base version is not the version present here."""


def delta_checksum(chosen: str | None, device: str) -> str:
    """The checksum of a run: the chosen one; by default sum64 on GPUs, which needs no copy to the host."""
    return chosen or ("sum64" if device == "cuda" else "xxh3-128")


@dataclass(frozen=True)
class DeltaIndex:
    """The index of a delta: its base version, its encoding and its files."""

    version: int
    base_version: int
    encoding: str
    compression: str
    checksum: str
    weight_map: Mapping[str, str]

    def require_base(self, version: int | str | None, *, delta: Path, owner: str) -> None:
        """Raise `BaseMismatch` unless `version`, held by `owner`, is the base version of this delta."""
        if str(self.base_version) != str(version):
            raise BaseMismatch(f"{delta.name} applies to version {self.base_version}, {owner} has {version}")


@dataclass
class DeltaPart:
    """One rank's part of a delta: its file (None if it had nothing to write), and its share of the statistics."""

    path: str | None = None
    names: list[str] = field(default_factory=list)
    changed_bytes: int = 0
    encode_seconds: float = 0.0
    write_seconds: float = 0.0

    def to_dict(self) -> JsonObject:
        return dict(vars(self))


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of a safetensors file: the range of its bytes, and its checksum if the file has one."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: str | None

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        if len(data) != self.end - self.start:
            raise BadDelta(f"{self.path} ends within {self.name}")
        return data


def write_part(path: Path, blobs: Mapping[str, bytes], checksums: Mapping[str, str]) -> None:
    """Write the blobs of one rank, each with the checksum of its new tensor."""
    save_file({name: np.frombuffer(blob, np.uint8) for name, blob in blobs.items()}, path, metadata=dict(checksums))
    fsync_path(path)


def join_parts(
    folder: Path, parts: Sequence[DeltaPart], *, version: int, base_version: int, encoding: str, checksum: str
) -> list[Path]:
    """Make one delta of the parts that the ranks wrote into `folder`: renames their files to a model folder's shard
    names and writes an index next to them. Returns all its files, synced to disk."""
    written = [part for part in parts if part.path is not None]
    names = [f"model-{number:05d}-of-{len(written):05d}.safetensors" for number in range(len(written))]
    for part, name in zip(written, names, strict=True):
        Path(str(part.path)).rename(folder / name)
    weight_map = {tensor: name for part, name in zip(written, names, strict=True) for tensor in part.names}
    index = write_index(folder, DeltaIndex(version, base_version, encoding, COMPRESSION, checksum, weight_map))
    fsync_path(index)
    return [*(folder / name for name in names), index]


def write_index(folder: Path, index: DeltaIndex) -> Path:
    metadata = {
        "version": f"{index.version:06d}",
        "base_version": f"{index.base_version:06d}",
        "delta_encoding": index.encoding,
        "compression_format": index.compression,
        "checksum_format": index.checksum,
    }
    path = folder / INDEX_NAME
    path.write_text(json.dumps({"metadata": metadata, "weight_map": dict(sorted(index.weight_map.items()))}, indent=2))
    return path


def read_index(folder: Path) -> DeltaIndex | None:
    """The index of a delta folder; None for a folder of whole weights."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    if not path.is_file():
        raise BadDelta(f"{path} is not a file")
    try:
        content = json.loads(path.read_text())
        metadata = content["metadata"]
        if "delta_encoding" not in metadata:
            return None
        index = DeltaIndex(
            version=int(metadata["version"]),
            base_version=int(metadata["base_version"]),
            encoding=metadata["delta_encoding"],
            compression=metadata["compression_format"],
            checksum=metadata["checksum_format"],
            weight_map=dict(content["weight_map"]),
        )
    except (KeyError, TypeError, ValueError) as cause:
        raise BadDelta(f"{path} is not the index of a delta: {type(cause).__name__}: {cause}") from cause
    if index.encoding not in ENCODINGS or index.compression != COMPRESSION:
        raise BadDelta(f"{path} names an unknown encoding or compression: {index.encoding}, {index.compression}")
    return index


def delta_entries(folder: Path, index: DeltaIndex) -> Iterator[SafetensorsEntry]:
    """The blobs that the index names, each with its checksum."""
    for file in sorted(set(index.weight_map.values())):
        path = folder / file
        if Path(file).name != file or not path.is_file():
            raise BadDelta(f"{folder} has no file {file}")
        named = {name for name, where in index.weight_map.items() if where == file}
        found = {entry.name: entry for entry in safetensors_entries(path)}
        for name in sorted(named):
            if name not in found or found[name].checksum is None:
                raise BadDelta(f"{path} has no blob with a checksum for {name}")
            yield found[name]


def safetensors_entries(path: Path) -> list[SafetensorsEntry]:
    """Locate each tensor of a safetensors file by its header, without reading any tensor."""
    try:
        header, checksums, start = read_safetensors_header(path)
    except ValueError as cause:
        raise BadDelta(f"{path} is not a safetensors file: {cause}") from cause
    return [
        SafetensorsEntry(
            name,
            path,
            facts["dtype"],
            tuple(facts["shape"]),
            start + facts["data_offsets"][0],
            start + facts["data_offsets"][1],
            checksums.get(name),
        )
        for name, facts in header.items()
    ]
