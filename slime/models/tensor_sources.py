"""Tensor sources: read any region of a tensor from files, through casts, slices and joins, without the rest.

Invariant: the region that a source reads is, bit for bit, the same region of the whole tensor. Only the bytes that the
region needs are read from files, except through functions that are not implemented here (`ComputedSource`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slime.models.families.tp_sharding import Region, region_shape, whole_region
from slime.models.safetensors_io import StoredTensor, dequantize_block

_T = TypeVar("_T")


class Source(Protocol):
    """A tensor whose regions are read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, region: Region) -> Tensor:
        """Read a region to the host; the caller may modify the result."""


def read_whole(source: Source) -> Tensor:
    return source.read(whole_region(source.shape))


def read_to_device(source: Source, region: Region, device: torch.device) -> Tensor:
    """Read a region to a device; a cast is done on the device, after the copy of the stored numbers."""
    if isinstance(source, CastSource):
        return source.of.read(region).to(device).to(source.dtype)
    return source.read(region).to(device)


CHUNK_NUMBERS = 2**24
"""Number of elements that are compared at once."""


def sources_equal(left: Source, right: Source) -> bool:
    """True if two sources have equal shapes and numbers; reads some rows at a time."""
    if left.shape != right.shape or left is right:
        return left is right
    if not left.shape:
        return torch.equal(read_whole(left), read_whole(right))
    count, rest = left.shape[0], whole_region(left.shape)[1:]
    rows = max(CHUNK_NUMBERS * count // max(math.prod(left.shape), 1), 1)
    parts = ((slice(begin, min(begin + rows, count)), *rest) for begin in range(0, count, rows))
    return all(torch.equal(left.read(part), right.read(part)) for part in parts)


@dataclass(frozen=True)
class ZeroSource:
    """A tensor of zeros."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, region: Region) -> Tensor:
        return torch.zeros(region_shape(region), dtype=self.dtype)


@dataclass(frozen=True)
class MemorySource:
    """A tensor in memory."""

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
class Fp8BlockSource:
    """A matrix in blocks of 8-bit floats, dequantised to float32."""

    stored: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read(self, region: Region) -> Tensor:
        if 0 in region_shape(region):
            return torch.empty(region_shape(region))
        covered = [  # the blocks that the region touches
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
class CastSource:
    """Another source, converted to another dtype."""

    of: Source
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def read(self, region: Region) -> Tensor:
        return self.of.read(region).to(self.dtype)


@dataclass(frozen=True)
class StackedSource:
    """Members of one shape, stacked along a new dimension, such as the experts of a layer."""

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
class ConcatenatedSource:
    """Members, concatenated along one of their dimensions."""

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
        wanted, begin = region[self.dim], 0
        for member in self.members:
            size = member.shape[self.dim]
            part = slice(max(wanted.start - begin, 0), min(wanted.stop - begin, size))
            if part.start < part.stop:
                inner = (*region[: self.dim], part, *region[self.dim + 1 :])
                length = part.stop - part.start
                result.narrow(self.dim, filled, length).copy_(member.read(inner))
                filled += length
            begin += size
        return result


@dataclass(frozen=True)
class TransposedSource:
    """Another source with two dimensions transposed."""

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

    def _swap(self, parts: tuple[_T, ...]) -> tuple[_T, ...]:
        swapped = list(parts)
        swapped[self.first], swapped[self.second] = parts[self.second], parts[self.first]
        return tuple(swapped)


@dataclass(frozen=True)
class NarrowedSource:
    """A range of another source along one dimension."""

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
class ComputedSource:
    """The result of a function of whole tensors, for functions that no other source implements."""

    compute: Callable[[], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, region: Region) -> Tensor:
        return self.compute()[region].clone()
