"""Parts of tensors, as where they begin and end; known without torch."""

from __future__ import annotations

from collections.abc import Iterable

Region = tuple[slice, ...]
"""A part of a tensor: begin and end along each dimension, both numbers and within its shape."""


def whole_region(shape: Iterable[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in region)


def overlap(one: Region, other: Region) -> Region | None:
    """What two parts of one tensor have in common; None if nothing."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(part.start >= part.stop for part in common) else common


def within(region: Region, outer: Region) -> Region:
    """The same part, counted from where another one begins."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(region, outer, strict=True))
