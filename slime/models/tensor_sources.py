"""Where the numbers of a tensor come from, so that any part of them can be made without the rest.

Invariant: the part that a source reads is, bit for bit, the same part of what it would read as a whole; only what the
part needs is read from the files, as far as the operations on the way are known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slime.models.families.tp_sharding import Region, region_shape, whole_region
from slime.models.safetensors_io import Stored, dequantize_block


class Source(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, region: Region) -> Tensor:
        """The numbers of a part, on the host; what comes back may be changed."""


def read_whole(source: Source) -> Tensor:
    return source.read(whole_region(source.shape))


def read_onto(source: Source, region: Region, device: torch.device) -> Tensor:
    """The numbers of a part on a device, which they travel to as they are stored and are cast on."""
    if isinstance(source, Cast):
        return source.of.read(region).to(device).to(source.dtype)
    return source.read(region).to(device)


CHUNK_NUMBERS = 2**24
"""How many numbers are compared at once."""


def same_numbers(left: Source, right: Source) -> bool:
    """Whether two sources read the same, of which some rows at a time are read to find out."""
    if left.shape != right.shape or left is right:
        return left is right
    if not left.shape:
        return torch.equal(read_whole(left), read_whole(right))
    count, rest = left.shape[0], whole_region(left.shape)[1:]
    rows = max(CHUNK_NUMBERS * count // max(math.prod(left.shape), 1), 1)
    parts = ((slice(begin, min(begin + rows, count)), *rest) for begin in range(0, count, rows))
    return all(torch.equal(left.read(part), right.read(part)) for part in parts)


@dataclass(frozen=True)
class Zeros:
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, region: Region) -> Tensor:
        return torch.zeros(region_shape(region), dtype=self.dtype)


@dataclass(frozen=True)
class Held:
    """Numbers that are in memory as they are."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, region: Region) -> Tensor:
        return self.tensor[region].clone()


@dataclass(frozen=True)
class Blocks:
    """A matrix in blocks of 8-bit floats, multiplied out to float32."""

    stored: Stored
    scale: Stored
    block: tuple[int, int]
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read(self, region: Region) -> Tensor:
        if 0 in region_shape(region):
            return torch.empty(region_shape(region))
        covered = [  # whole blocks, and what of them there is at the edges
            slice(part.start // size, -(-part.stop // size)) for part, size in zip(region, self.block, strict=True)
        ]
        around = tuple(
            slice(part.start * size, min(part.stop * size, side))
            for part, size, side in zip(covered, self.block, self.shape, strict=True)
        )
        numbers = dequantize_block(self.stored.read(around), self.scale.read(tuple(covered)), self.block)
        inner = tuple(
            slice(part.start - edge.start, part.stop - edge.start) for part, edge in zip(region, around, strict=True)
        )
        return numbers[inner]


@dataclass(frozen=True)
class Cast:
    of: Source
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def read(self, region: Region) -> Tensor:
        return self.of.read(region).to(self.dtype)


@dataclass(frozen=True)
class Stacked:
    """Members of one shape side by side along a new dimension: the experts of a layer, say."""

    members: Sequence[Source]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.members[0].shape
        return (*inner[: self.dim], len(self.members), *inner[self.dim :])

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].dtype

    def read(self, region: Region) -> Tensor:
        inner = (*region[: self.dim], *region[self.dim + 1 :])
        result = torch.empty(region_shape(region), dtype=self.dtype)
        for index, member in enumerate(self.members[region[self.dim]]):
            result.select(self.dim, index).copy_(member.read(inner))
        return result


@dataclass(frozen=True)
class Joined:
    """Members end to end along one of their dimensions."""

    members: Sequence[Source]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.members[0].shape)
        shape[self.dim] = sum(member.shape[self.dim] for member in self.members)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].dtype

    def read(self, region: Region) -> Tensor:
        result, filled = torch.empty(region_shape(region), dtype=self.dtype), 0
        for member, part in self._touched(region[self.dim]):
            inner = (*region[: self.dim], part, *region[self.dim + 1 :])
            length = part.stop - part.start
            result.narrow(self.dim, filled, length).copy_(member.read(inner))
            filled += length
        return result

    def _touched(self, wanted: slice) -> Iterator[tuple[Source, slice]]:
        begin = 0
        for member in self.members:
            size = member.shape[self.dim]
            part = slice(max(wanted.start - begin, 0), min(wanted.stop - begin, size))
            if part.start < part.stop:
                yield member, part
            begin += size


@dataclass(frozen=True)
class Swapped:
    """Two dimensions exchanged."""

    of: Source
    first: int
    second: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self._swap(self.of.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def read(self, region: Region) -> Tensor:
        return self.of.read(self._swap(region)).transpose(self.first, self.second).contiguous()

    def _swap(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        swapped = list(parts)
        swapped[self.first], swapped[self.second] = parts[self.second], parts[self.first]
        return tuple(swapped)


@dataclass(frozen=True)
class Cut:
    """A stretch along one dimension."""

    of: Source
    dim: int
    begin: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.of.shape[: self.dim], self.length, *self.of.shape[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def read(self, region: Region) -> Tensor:
        part = region[self.dim]
        moved = slice(part.start + self.begin, part.stop + self.begin)
        return self.of.read((*region[: self.dim], moved, *region[self.dim + 1 :]))


@dataclass(frozen=True)
class Computed:
    """What a function makes of whole tensors, for functions of which nothing more is known here."""

    compute: Callable[[], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, region: Region) -> Tensor:
        return self.compute()[region].clone()
