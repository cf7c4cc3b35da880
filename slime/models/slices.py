"""Parts of the tensors in safetensors files.

Invariant: a part is read with the rows it has along its first dimension and nothing else of the file; it lies in memory
of its own, and no file is mapped, so what was read and let go of costs no memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.errors import UserError
from slime.models.regions import Region, region_shape

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, region: Region) -> torch.Tensor:
        shape = region_shape(region)
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        rows = region[0] if region else slice(0, 1)
        raw = self._bytes(self.begin + rows.start * row, (rows.stop - rows.start) * row)
        read = raw.view(self.dtype).view(shape[:1] + self.shape[1:])
        return read if read.shape == shape else read[(slice(None), *region[1:])].contiguous()

    def _bytes(self, begin: int, count: int) -> torch.Tensor:
        """Read by pieces: the system gives at most 2 GiB at once, and less where the file ends too early."""
        raw = torch.empty(count, dtype=torch.uint8)
        space, done = raw.numpy().data, 0
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(begin)
                while done < count and (got := file.readinto(space[done:])):
                    done += got
        except OSError as cause:
            raise UserError(f"{self.path} cannot be read: {cause.strerror}") from cause
        if done < count:
            raise UserError(f"{self.path} ends before {self.name} does: copy or download it again")
        return raw


def stored_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of some files by name, from their headers alone; of a name in two files, the later file's."""
    return {stored.name: stored for path in sorted(files) for stored in _read_header(path)}


def _read_header(path: Path) -> list[Stored]:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            (length,) = struct.unpack("<Q", start) if len(start) == 8 else (0,)
            header: dict[str, Any] = json.loads(file.read(length) if length <= _LONGEST_HEADER else "")
        size = path.stat().st_size
        found = [_stored(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    except OSError as cause:
        raise UserError(f"{path} cannot be loaded: {cause.strerror}") from cause
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise UserError(f"{path} cannot be loaded: its beginning is not that of a safetensors file") from cause
    for stored in found:
        if stored.begin + stored.num_bytes > size:
            raise UserError(f"{path} cannot be loaded: it ends before {stored.name} does, copy or download it again")
    return found


def _stored(path: Path, name: str, entry: Any, data_begin: int) -> Stored:
    kind = DTYPES.get(entry["dtype"])
    if kind is None:
        raise UserError(f"{name} in {path} is of type {entry['dtype']}, which cannot be read: convert the folder first")
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if min((begin, *shape), default=0) < 0 or end - begin != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{name} has {end - begin} bytes, which its shape and type do not give")
    return Stored(path, name, shape, kind, data_begin + begin)
