"""Sharding forms: the regions of a model folder's tensors that form a Megatron parameter, for any tensor-parallel size.

Invariant: `join` of the shares of a shard is the rank's parameter, and `split` of the parameter returns the shares, bit
for bit. Over all ranks the shares that are not copies cover every tensor of the folder exactly once. Padding belongs to
no tensor: it is zero after `join`, and `split` drops it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Region = tuple[slice, ...]
"""A part of a tensor: start and stop along each dimension, both set and within its shape."""


def whole_region(shape: Iterable[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in region)


def region_overlap(one: Region, other: Region) -> Region | None:
    """The intersection of two regions of one tensor; None if it is empty."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(part.start >= part.stop for part in common) else common


def relative_region(region: Region, outer: Region) -> Region:
    """The same region, relative to the start of `outer`."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(region, outer, strict=True))


Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SourceRegion:
    """A region of tensor number `source`, from 0, of a rule's tensors."""

    source: int
    region: Region


class Shard(Protocol):
    """The part of a parameter that one rank holds."""

    @property
    def shape(self) -> Shape:
        """The shape of the parameter on this rank."""

    @property
    def shares(self) -> tuple[SourceRegion, ...]:
        """The regions of the folder's tensors that form the parameter; regions may be empty."""

    @property
    def is_copy(self) -> bool:
        """True if rank 0 holds the same numbers; then only rank 0 writes them."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Assemble the parameter from the tensors of `shares`."""

    def split(self, local: Tensor) -> tuple[Tensor, ...]:
        """Split the parameter into the tensors of `shares`, which may be views and not contiguous."""


class Form:
    """A way to shard a parameter over tensor-parallel ranks."""

    def shard(self, shapes: Sequence[Shape], rank: int, size: int) -> Shard:
        """The part that rank `rank` of `size` holds, given the whole shapes of the folder's tensors."""
        raise NotImplementedError

    def of_expert(self, expert: int) -> Form:
        """The form for one expert; another one only if a tensor of the folder holds all experts of a layer."""
        return self


@dataclasses.dataclass(frozen=True)
class SourceSpan:
    """A range of rows (or columns) of tensor number `source` of the folder; padding if `source` is -1."""

    source: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


PADDING = -1
Lane = list[SourceSpan]
"""Spans in Megatron's order; each rank holds an equal interval of every lane."""


@dataclasses.dataclass(frozen=True)
class SpanShard:
    """A parameter that is a concatenation of spans of the folder's tensors along `dim`."""

    dim: int
    shapes: tuple[Shape, ...]
    stretches: tuple[SourceSpan, ...]
    is_copy: bool = False

    @property
    def shape(self) -> Shape:
        shape = list(self.shapes[0])
        shape[self.dim : self.dim + 1] = [sum(stretch.length for stretch in self.stretches)] if shape else []
        return tuple(shape)

    @property
    def shares(self) -> tuple[SourceRegion, ...]:
        shares = []
        for part in self._parts():
            region = list(whole_region(self.shapes[part.source]))
            if region:
                region[self.dim] = slice(part.begin, part.end)
            shares.append(SourceRegion(part.source, tuple(region)))
        return tuple(shares)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        if len(self.shapes) == len(self.stretches) == 1 and self.stretches[0].source != PADDING:
            return parts[0]
        local = parts[0].new_zeros(self.shape)
        for where, part, inner in self._places():
            local.narrow(self.dim, where, inner.length).copy_(parts[part].narrow(self.dim, inner.begin, inner.length))
        return local

    def split(self, local: Tensor) -> tuple[Tensor, ...]:
        if len(self.shapes) == len(self.stretches) == 1 and self.stretches[0].source != PADDING:
            return (local,)
        found: list[list[tuple[int, Tensor]]] = [[] for _ in self._parts()]
        for where, part, inner in self._places():
            found[part].append((inner.begin, local.narrow(self.dim, where, inner.length)))
        result: list[Tensor] = []
        for pieces in found:
            ordered = [piece for _, piece in sorted(pieces, key=lambda one: one[0])]
            if not ordered:
                result.append(local.narrow(self.dim, 0, 0))
            elif len(ordered) == 1:
                result.append(ordered[0])
            else:
                import torch  # here, because plans read families without importing torch

                result.append(torch.cat(ordered, self.dim))
        return tuple(result)

    def _parts(self) -> list[SourceSpan]:
        """The spans, with neighbours in the folder merged; a tensor of which nothing is held has an empty part."""
        parts: list[SourceSpan] = []
        for source in range(len(self.shapes)):
            own = sorted((s for s in self.stretches if s.source == source), key=lambda one: one.begin)
            merged: list[SourceSpan] = []
            for stretch in own:
                if merged and merged[-1].end == stretch.begin:
                    merged[-1] = SourceSpan(source, merged[-1].begin, stretch.end)
                else:
                    merged.append(stretch)
            parts += merged or [SourceSpan(source, 0, 0)]
        return parts

    def _places(self) -> Iterator[tuple[int, int, SourceSpan]]:
        """For each span: its start in the parameter, the index of its part, and its range within that part."""
        parts, where = self._parts(), 0
        for stretch in self.stretches:
            for index, part in enumerate(parts):
                if part.source == stretch.source and part.begin <= stretch.begin and stretch.end <= part.end:
                    begin = stretch.begin - part.begin
                    yield where, index, SourceSpan(stretch.source, begin, begin + stretch.length)
                    break
            where += stretch.length


def rank_interval(lane: Lane, rank: int, size: int) -> Lane:
    """The interval of a lane that one rank holds."""
    length = sum(stretch.length for stretch in lane)
    if length % size:
        raise ValueError(f"{length} rows cannot be shared evenly by {size} tensor-parallel ranks")
    begin, end, at, found = rank * length // size, (rank + 1) * length // size, 0, []
    for stretch in lane:
        first, last = max(begin - at, 0), min(end - at, stretch.length)
        if first < last:
            found.append(SourceSpan(stretch.source, stretch.begin + first, stretch.begin + last))
        at += stretch.length
    return found


class LaneForm(Form):
    """Base of forms that consist of lanes along one dimension."""

    dim = 0

    def lanes(self, shapes: Sequence[Shape], size: int) -> list[Lane]:
        raise NotImplementedError

    def shard(self, shapes: Sequence[Shape], rank: int, size: int) -> Shard:
        held = [stretch for lane in self.lanes(shapes, size) for stretch in rank_interval(lane, rank, size)]
        return SpanShard(self.dim, tuple(map(tuple, shapes)), tuple(held))


@dataclasses.dataclass(frozen=True)
class Replicated(Form):
    """Replicated on every rank: norms, routers, biases of row-parallel layers, scalars."""

    def shard(self, shapes: Sequence[Shape], rank: int, size: int) -> Shard:
        rows = shapes[0][0] if shapes[0] else 1
        return SpanShard(0, (tuple(shapes[0]),), (SourceSpan(0, 0, rows),), is_copy=rank > 0)


@dataclasses.dataclass(frozen=True)
class ColumnParallel(LaneForm):
    """A column-parallel layer: its output, the first dimension, is sharded; weights and biases."""

    def lanes(self, shapes: Sequence[Shape], size: int) -> list[Lane]:
        return [[SourceSpan(0, 0, shapes[0][0])]]


@dataclasses.dataclass(frozen=True)
class RowParallel(LaneForm):
    """A row-parallel layer: its input, the second dimension, is sharded."""

    dim = 1

    def lanes(self, shapes: Sequence[Shape], size: int) -> list[Lane]:
        return [[SourceSpan(0, 0, shapes[0][1])]]


@dataclasses.dataclass(frozen=True)
class Vocab(LaneForm):
    """Vocabulary rows, padded so that they can be sharded evenly (see padded_vocab)."""

    divisible_by: int = 128

    def lanes(self, shapes: Sequence[Shape], size: int) -> list[Lane]:
        rows = shapes[0][0]
        return [[SourceSpan(0, 0, rows), SourceSpan(PADDING, 0, padded_vocab(rows, self.divisible_by, size) - rows)]]


def padded_vocab(rows: int, divisible_by: int, size: int) -> int:
    """Megatron's padding: to a multiple of --make-vocab-size-divisible-by times the tensor-parallel size."""
    multiple = divisible_by * size
    return math.ceil(rows / multiple) * multiple


@dataclasses.dataclass(frozen=True)
class GateUp(LaneForm):
    """Gate and up projections in one parameter: the rank's rows of the gate, then its rows of the up projection."""

    def lanes(self, shapes: Sequence[Shape], size: int) -> list[Lane]:
        return [[SourceSpan(source, 0, shapes[source][0])] for source in (0, 1)]


@dataclasses.dataclass(frozen=True)
class FusedGateUp(LaneForm):
    """`GateUp` for a folder with one tensor, in which the gate's rows come first."""

    def lanes(self, shapes: Sequence[Shape], size: int) -> list[Lane]:
        half = shapes[0][0] // 2
        return [[SourceSpan(0, 0, half)], [SourceSpan(0, half, 2 * half)]]


@dataclasses.dataclass(frozen=True)
class Qkv(LaneForm):
    """Queries, keys and values, or their biases, group by group: the queries of a group, its key, its value.

    With an output gate each head's rows in the query projection of the folder are its query and its gate; Megatron has
    the queries of a group before its gates. With more ranks than groups, groups are split across ranks, as in Megatron.
    """

    groups: int
    is_gated: bool = False

    def lanes(self, shapes: Sequence[Shape], size: int) -> list[Lane]:
        head = shapes[1][0] // self.groups
        queries = shapes[0][0] // self.groups
        lane: Lane = []
        for group in range(self.groups):
            first = group * queries
            if self.is_gated:
                for gate in (0, head):
                    starts = range(first + gate, first + queries, 2 * head)
                    lane += [SourceSpan(0, start, start + head) for start in starts]
            else:
                lane.append(SourceSpan(0, first, first + queries))
            lane += [SourceSpan(source, group * head, (group + 1) * head) for source in (1, 2)]
        return [lane]


@dataclasses.dataclass(frozen=True)
class InterleavedGateUp(Form):
    """Gate and up projections with interleaved rows in one tensor, as in gpt-oss."""

    def shard(self, shapes: Sequence[Shape], rank: int, size: int) -> Shard:
        ((rows, *rest),) = shapes
        (held,) = rank_interval([SourceSpan(0, 0, rows // 2)], rank, size)
        return InterleavedShard(2 * held.begin, (2 * held.length, *rest))


@dataclasses.dataclass(frozen=True)
class InterleavedShard:
    """A rank's rows of interleaved gate and up projections."""

    begin: int
    shape: Shape
    is_copy: bool = False

    @property
    def shares(self) -> tuple[SourceRegion, ...]:
        rows = slice(self.begin, self.begin + self.shape[0])
        return (SourceRegion(0, (rows, *whole_region(self.shape[1:]))),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)

    def split(self, local: Tensor) -> tuple[Tensor, ...]:
        return (local.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1),)


@dataclasses.dataclass(frozen=True)
class StackedExperts(Form):
    """One expert's part of tensors that hold all experts of a layer along their first dimension."""

    inner: Form
    is_transposed: bool = False
    """The folder has inputs before outputs."""
    expert: int = 0

    def shard(self, shapes: Sequence[Shape], rank: int, size: int) -> Shard:
        own = [tuple(reversed(shape[1:])) if self.is_transposed else tuple(shape[1:]) for shape in shapes]
        return StackedExpertsShard(self.inner.shard(own, rank, size), self.is_transposed, self.expert)

    def of_expert(self, expert: int) -> Form:
        return dataclasses.replace(self, expert=expert)


@dataclasses.dataclass(frozen=True)
class StackedExpertsShard:
    """A rank's part of one expert in tensors of all experts."""

    inner: Shard
    is_transposed: bool
    expert: int

    @property
    def shape(self) -> Shape:
        return self.inner.shape

    @property
    def is_copy(self) -> bool:
        return self.inner.is_copy

    @property
    def shares(self) -> tuple[SourceRegion, ...]:
        expert = slice(self.expert, self.expert + 1)
        return tuple(
            SourceRegion(share.source, (expert, *(reversed(share.region) if self.is_transposed else share.region)))
            for share in self.inner.shares
        )

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        own = [part.squeeze(0) for part in parts]
        return self.inner.join([part.t() for part in own] if self.is_transposed else own)

    def split(self, local: Tensor) -> tuple[Tensor, ...]:
        own = self.inner.split(local)
        return tuple((part.t() if self.is_transposed else part).unsqueeze(0) for part in own)


@dataclasses.dataclass(frozen=True)
class Segments(LaneForm):
    """One tensor whose rows are segments of these sizes, each of them sharded over all ranks."""

    sizes: tuple[int, ...]

    def lanes(self, shapes: Sequence[Shape], size: int) -> list[Lane]:
        return _segments(0, self.sizes)


@dataclasses.dataclass(frozen=True)
class DeltaInput(LaneForm):
    """All input projections of a gated delta net in one parameter: queries, keys, values, gates z, then b and a.

    The folder has queries, keys and values in one tensor (`key` rows, `key` rows and the rest) and one tensor for each
    of the others.
    """

    key: int

    def lanes(self, shapes: Sequence[Shape], size: int) -> list[Lane]:
        qkv = (self.key, self.key, shapes[0][0] - 2 * self.key)
        return [*_segments(0, qkv), *([SourceSpan(source, 0, shapes[source][0])] for source in (1, 2, 3))]


@dataclasses.dataclass(frozen=True)
class GroupedDeltaInput(LaneForm):
    """`DeltaInput` for a folder with two tensors, both grouped by key head: query, key, values and gates; b and a."""

    key_heads: int
    key_head: int

    def lanes(self, shapes: Sequence[Shape], size: int) -> list[Lane]:
        values = shapes[0][0] // self.key_heads // 2 - self.key_head
        heads = shapes[1][0] // self.key_heads // 2
        return [
            *self._by_head(0, (self.key_head, self.key_head, values, values)),
            *self._by_head(1, (heads, heads)),
        ]

    def _by_head(self, source: int, sizes: tuple[int, ...]) -> list[Lane]:
        one = _segments(source, sizes)
        step = sum(sizes)
        return [
            [SourceSpan(source, part.begin + step * head, part.end + step * head) for head in range(self.key_heads)]
            for (part,) in one
        ]


def _segments(source: int, sizes: Sequence[int]) -> list[Lane]:
    ends = list(itertools.accumulate(sizes))
    return [[SourceSpan(source, end - size, end)] for end, size in zip(ends, sizes, strict=True)]
