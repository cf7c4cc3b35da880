"""Reads a distributed checkpoint as the tensors of a model folder.

Invariant: every tensor that the model's rules name is, bit for bit, the part of its Megatron parameters; padding of the
vocabulary is dropped. At most one parameter is in memory between two reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
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
from slime.models.tensor_sources import DerivedSource, Source, narrowed_source, read_whole
from slime.models.torch_dist.index import TorchDist, find_parameter


def model_entries(model_folder: Path, names: Collection[str]) -> tuple[list[ParameterEntry], bool]:
    """The parameters of a folder's model, and whether all its layers are of one kind, so that Megatron stacks them."""
    config = read_text_config(model_folder)
    family = family_of(config)
    fields, rules = family.fields(config), rules_for_folder(family.rules(config), names)
    of_kinds = (fields.get("moe_layer_freq"), fields.get("linear_attention_freq"))
    return list(entries_by_name(rules).values()), not any(isinstance(one, list) for one in of_kinds)


def checkpoint_sources(model_folder: Path, checkpoint: Path) -> dict[str, Source]:
    """The tensors of a checkpoint, under the names of its model folder.

    `UserError` if the checkpoint lacks a parameter or is of another model.
    """
    shapes = {name: source.shape for name, source in plain_sources(model_folder).items()}
    entries, _ = model_entries(model_folder, shapes)
    opened = TorchDist(checkpoint)
    parameters = [(entry, *_open_parameter(opened, entry, shapes)) for entry in entries if not entry.is_copy]
    pieces: dict[str, list[tuple[Region, int, int]]] = {}  # regions of a tensor: parameter, number of its part
    for index, (entry, _, shard) in enumerate(parameters):
        for number, share in enumerate(shard.shares):
            if 0 not in region_shape(share.region):
                pieces.setdefault(entry.hf[share.source], []).append((share.region, index, number))
    last: dict[int, tuple[Tensor, ...]] = {}  # the parts of one parameter, since neighbours in the folder share it

    def read(name: str, region: Region) -> Tensor:
        result = torch.empty(region_shape(region), dtype=sources[name].dtype)
        for held, index, number in pieces[name]:
            common = region_overlap(held, region)
            if common is None:
                continue
            if index not in last:
                last.clear()
                _, source, shard = parameters[index]
                last[index] = shard.split(read_whole(source))
            result[relative_region(common, region)] = last[index][number][relative_region(common, held)]
        return result

    sources: dict[str, Source] = {
        name: DerivedSource(shapes[name], parameters[first][1].dtype, partial(read, name))
        for name, ((_, first, _), *_) in pieces.items()
    }
    return sources


def _open_parameter(
    checkpoint: TorchDist, entry: ParameterEntry, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Source, Shard]:
    """A parameter of the checkpoint, and how it splits into tensors of the folder."""
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
            source = narrowed_source(source, 0, 0, rows)
    if source.shape != shard.shape:
        raise UserError(
            f"{entry.megatron} is {source.shape} in {checkpoint.folder}, but {shard.shape} by the model folder: it is "
            "a checkpoint of another model"
        )
    return source, shard
