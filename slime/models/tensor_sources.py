"""Tensor sources: read any region of a tensor from files, through casts, slices and joins, without the rest.

Invariant: the region that a source reads is, bit for bit, the same region of the whole tensor. Only the bytes that the
region needs are read from files, except through functions that are not implemented here (`computed_source`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slime.models.families.tp_sharding import Region, region_shape, whole_region

_T = TypeVar("_T")
Shape = tuple[int, ...]


class Source(Protocol):
    """A tensor whose regions are read on demand."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, region: Region, /) -> Tensor:
        """Read a region to the host; the caller may modify the result."""


@dataclass(frozen=True, eq=False)
class DerivedSource:
    """A source with a function that reads its regions; `cast_from` is the source that it only casts to its dtype."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[Region], Tensor]
    cast_from: Source | None = None


def read_whole(source: Source) -> Tensor:
    return source.read(whole_region(source.shape))


def read_to_device(source: Source, region: Region, device: torch.device) -> Tensor:
    """Read a region to a device; a cast is done on the device, after the copy of the stored numbers."""
    if isinstance(source, DerivedSource) and source.cast_from is not None:
        return source.cast_from.read(region).to(device).to(source.dtype)
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


def zero_source(shape: Shape, dtype: torch.dtype) -> Source:
    """A tensor of zeros."""
    return DerivedSource(shape, dtype, lambda region: torch.zeros(region_shape(region), dtype=dtype))


def memory_source(tensor: Tensor) -> Source:
    """A tensor in memory."""
    return DerivedSource(tuple(tensor.shape), tensor.dtype, lambda region: tensor[region].clone())


def cast_source(of: Source, dtype: torch.dtype) -> Source:
    """Another source, converted to another dtype."""
    return DerivedSource(of.shape, dtype, lambda region: of.read(region).to(dtype), cast_from=of)


def row_source(of: Source, row: Shape) -> Source:
    """One row of a source (along its first dimensions), as a source of fewer dimensions."""
    before = tuple(slice(number, number + 1) for number in row)
    return DerivedSource(
        of.shape[len(row) :], of.dtype, lambda region: of.read((*before, *region)).reshape(region_shape(region))
    )


def stacked_source(members: Sequence[Source], dim: int) -> Source:
    """Members of one shape, stacked along a new dimension, such as the experts of a layer."""
    inner, dtype = members[0].shape, members[0].dtype

    def read(region: Region) -> Tensor:
        result = torch.empty(region_shape(region), dtype=dtype)
        for index, member in enumerate(members[region[dim]]):
            result.select(dim, index).copy_(member.read((*region[:dim], *region[dim + 1 :])))
        return result

    return DerivedSource((*inner[:dim], len(members), *inner[dim:]), dtype, read)


def concatenated_source(members: Sequence[Source], dim: int) -> Source:
    """Members, concatenated along one of their dimensions."""
    inner, dtype = members[0].shape, members[0].dtype

    def read(region: Region) -> Tensor:
        result, filled = torch.empty(region_shape(region), dtype=dtype), 0
        wanted, begin = region[dim], 0
        for member in members:
            size = member.shape[dim]
            part = slice(max(wanted.start - begin, 0), min(wanted.stop - begin, size))
            length = part.stop - part.start
            if length > 0:
                found = member.read((*region[:dim], part, *region[dim + 1 :]))
                result.narrow(dim, filled, length).copy_(found)
                filled += length
            begin += size
        return result

    total = sum(member.shape[dim] for member in members)
    return DerivedSource((*inner[:dim], total, *inner[dim + 1 :]), dtype, read)


def transposed_source(of: Source, first: int, second: int) -> Source:
    """Another source with two dimensions transposed."""

    def swap(parts: tuple[_T, ...]) -> tuple[_T, ...]:
        swapped = list(parts)
        swapped[first], swapped[second] = parts[second], parts[first]
        return tuple(swapped)

    return DerivedSource(
        swap(of.shape), of.dtype, lambda region: of.read(swap(region)).transpose(first, second).contiguous()
    )


def narrowed_source(of: Source, dim: int, begin: int, length: int) -> Source:
    """A range of another source along one dimension."""

    def read(region: Region) -> Tensor:
        moved = slice(region[dim].start + begin, region[dim].stop + begin)
        return of.read((*region[:dim], moved, *region[dim + 1 :]))

    return DerivedSource((*of.shape[:dim], length, *of.shape[dim + 1 :]), of.dtype, read)


def computed_source(compute: Callable[[], Tensor], shape: Shape, dtype: torch.dtype) -> Source:
    """The result of a function of whole tensors, for functions that no other source implements."""
    return DerivedSource(shape, dtype, lambda region: compute()[region].clone())
