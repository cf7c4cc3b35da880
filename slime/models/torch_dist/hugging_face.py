"""Reads a distributed checkpoint as the tensors of a model folder.

Invariant: every tensor that the model's rules name is, bit for bit, the part of its Megatron parameters; padding of the
vocabulary is dropped. At most one parameter is in memory between two reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from slime.errors import UserError
from slime.models.dequantized import plain_sources
from slime.models.families.family import family_of
from slime.models.families.tp_sharding import (
    ColumnParallel,
    Region,
    Shard,
    Vocab,
    region_overlap,
    region_shape,
    relative_region,
)
from slime.models.families.weight_map import ParameterEntry, entries_by_name, rules_for_folder
from slime.models.folder import read_text_config
from slime.models.tensor_sources import NarrowedSource, Source, read_whole
from slime.models.torch_dist.index import TorchDist, find_parameter

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors of a model folder, by name."""


@dataclass
class _SplitCache:
    """Cache with the parts of the parameter that was read last, since neighbours in the folder often share one."""

    name: str | None = None
    parts: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _CheckpointParameter:
    """A parameter of the checkpoint, split into tensors of the folder when it is read."""

    name: str
    source: Source
    shard: Shard
    last: _SplitCache

    def parts(self) -> tuple[Tensor, ...]:
        if self.last.name != self.name:
            self.last.name, self.last.parts = None, ()
            self.last.parts = self.shard.split(read_whole(self.source))
            self.last.name = self.name
        return self.last.parts


@dataclass(frozen=True)
class AssembledTensor:
    """A tensor of a folder, assembled from parts of parameters; a tensor source."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[Region, _CheckpointParameter, int]] = field(default_factory=list)

    def read(self, region: Region) -> Tensor:
        result = torch.empty(region_shape(region), dtype=self.dtype)
        for held, parameter, number in self.pieces:
            common = region_overlap(held, region)
            if common is not None:
                result[relative_region(common, region)] = parameter.parts()[number][relative_region(common, held)]
        return result


def model_entries(model_folder: Path, names: Collection[str]) -> tuple[list[ParameterEntry], bool]:
    """The parameters of a folder's model, and whether all its layers are of one kind, so that Megatron stacks them."""
    config = read_text_config(model_folder)
    family = family_of(config)
    fields, rules = family.fields(config), rules_for_folder(family.rules(config), names)
    of_kinds = (fields.get("moe_layer_freq"), fields.get("linear_attention_freq"))
    return list(entries_by_name(rules).values()), not any(isinstance(one, list) for one in of_kinds)


def checkpoint_sources(model_folder: Path, checkpoint: Path) -> dict[str, Source]:
    """The tensors of a checkpoint, under the names of its model folder."""
    shapes = {name: source.shape for name, source in plain_sources(model_folder).items()}
    entries, _ = model_entries(model_folder, shapes)
    return dict(assemble_folder_tensors(checkpoint, entries, shapes))


def assemble_folder_tensors(
    folder: Path, entries: Iterable[ParameterEntry], shapes: Shapes
) -> dict[str, AssembledTensor]:
    """A source for every tensor of the folder; `UserError` if the checkpoint lacks one or is of another model."""
    checkpoint, last = TorchDist(folder), _SplitCache()
    found: dict[str, AssembledTensor] = {}
    for entry in entries:
        if entry.is_copy:
            continue
        parameter = _open_parameter(checkpoint, entry, shapes, last)
        for number, share in enumerate(parameter.shard.shares):
            if 0 in region_shape(share.region):
                continue
            name = entry.hf[share.source]
            made = found.setdefault(name, AssembledTensor(name, shapes[name], parameter.source.dtype))
            made.pieces.append((share.region, parameter, number))
    return found


def _open_parameter(
    checkpoint: TorchDist, entry: ParameterEntry, shapes: Shapes, last: _SplitCache
) -> _CheckpointParameter:
    absent = next((name for name in entry.hf if name not in shapes), None)
    if absent is not None:
        raise UserError(f"the model folder lacks {absent}, which {entry.megatron} needs: use the complete folder")
    source = find_parameter(checkpoint, entry.megatron)
    if source is None:
        raise UserError(f"{checkpoint.folder} lacks {entry.megatron}: it is a checkpoint of another model")
    shard = entry.form.shard([shapes[name] for name in entry.hf], 0, 1)
    if isinstance(entry.form, Vocab):  # padded for the number of ranks that wrote it
        rows = shapes[entry.hf[0]][0]
        if source.shape[0] >= rows:
            shard = ColumnParallel().shard([shapes[entry.hf[0]]], 0, 1)
            source = NarrowedSource(source, 0, 0, rows)
    if source.shape != shard.shape:
        raise UserError(
            f"{entry.megatron} is {source.shape} in {checkpoint.folder}, but {shard.shape} by the model folder: it is "
            "a checkpoint of another model"
        )
    return _CheckpointParameter(entry.megatron, source, shard, last)
