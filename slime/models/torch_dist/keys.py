"""Which tensor of a distributed checkpoint a Megatron parameter is, or which part of one.

    decoder.layers.self_attention.linear_qkv.weight [L, ...]        all layers alike: one tensor with a row for each
    decoder.layers.3.self_attention.linear_qkv.weight               layers of several kinds: each its own
    decoder.layers.3.mlp.experts.experts.linear_fc1.weight [E, ...] the experts of a layer
    ..._w, ..._v; .query, .key, ...                                 what is shared by tensor-parallel ranks in pieces

Invariant: names are global (layers count over the pipeline, experts over expert-parallel ranks), and a tensor is the
parameter as one tensor-parallel rank alone would have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime.models.regions import Region
from slime.models.sources import Joined, Source
from slime.models.torch_dist.tensors import TorchDist

_LAYER = re.compile(r"^(.*?layers\.)(\d+)\.(.+)$")
_EXPERT = re.compile(r"^(.*mlp\.experts\.)(linear_fc\d)\.(weight|bias)(\d+)$")
_PIECES = (
    ("_w", "_v"),
    (".query", ".key", ".value", ".z", ".beta", ".alpha"),
    (".query", ".key", ".value"),
)


@dataclass(frozen=True)
class Place:
    """A tensor of a checkpoint, and the row of it (of its rows' rows) that a parameter is."""

    key: str
    row: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    """How many rows there are; known where they are written."""


@dataclass(frozen=True)
class Row:
    """One row of a source, as a source of fewer dimensions."""

    of: Source
    row: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape[len(self.row) :]

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def read(self, region: Region) -> Tensor:
        inner = self.of.read((*(slice(number, number + 1) for number in self.row), *region))
        return inner.reshape(inner.shape[len(self.row) :])


def find_parameter(checkpoint: TorchDist, name: str) -> Source | None:
    """The numbers of a parameter; None where the checkpoint has none of that name."""
    for place in _places(name):
        for suffixes in (("",), *_PIECES):
            if all(place.key + suffix in checkpoint for suffix in suffixes):
                found = [checkpoint.source(place.key + suffix) for suffix in suffixes]
                if any(len(one.shape) < len(place.row) for one in found):
                    continue
                if any(number >= size for one in found for number, size in zip(place.row, one.shape, strict=False)):
                    continue
                rows: list[Source] = [Row(one, place.row) if place.row else one for one in found]
                return rows[0] if len(rows) == 1 else Joined(rows, 0)
    return None


def place_to_write(name: str, *, layers: int, experts: int, alike: bool) -> Place:
    """Where Megatron looks for a parameter; `alike`: whether all layers are of one kind."""
    plain, stacked = _by_layer(name)
    place = stacked if alike and stacked is not None else plain
    rows = (layers,) * len(place.row)
    expert = _EXPERT.match(place.key)
    if expert is None:
        return replace(place, rows=rows)
    return Place(f"{expert[1]}experts.{expert[2]}.{expert[3]}", (*place.row, int(expert[4])), (*rows, experts))


def count_rows(names: Iterable[str]) -> tuple[int, int]:
    """How many layers and how many experts some parameters are of."""
    layers, experts = 0, 0
    for name in names:
        if (layer := _LAYER.match(name)) is not None:
            layers = max(layers, int(layer[2]) + 1)
        if (expert := _EXPERT.match(name)) is not None:
            experts = max(experts, int(expert[4]) + 1)
    return layers, experts


def _places(name: str) -> Iterator[Place]:
    """Where a parameter may be."""
    for place in _by_layer(name):
        if place is None:
            continue
        expert = _EXPERT.match(place.key)
        if expert is None:
            yield place
            continue
        tail = f"{expert[2]}.{expert[3]}"
        yield Place(f"{expert[1]}experts.{tail}", (*place.row, int(expert[4])))
        yield Place(f"{expert[1]}experts.{expert[4]}.{tail}", place.row)


def _by_layer(name: str) -> tuple[Place, Place | None]:
    """On its own, and as a row of a tensor of all layers."""
    layer = _LAYER.match(name)
    return Place(name), None if layer is None else Place(layer[1] + layer[3], (int(layer[2]),))
