"""Plans the conversion of a model's parameters to the tensors of a model folder, piece by piece.

Invariant: every tensor of the folder comes from exactly one piece, and a piece never needs more than one layer.
transformers may fuse weights while loading (such as the experts of a layer). A parameter that is a stack of experts is
converted some rows at a time, so that a layer of experts is never whole in one place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Converts parameters of one layer to their names and shapes in a model folder."""

ROWS_BYTES = 128 * 2**20
"""Most bytes of stacked experts in one piece; a piece has at least one expert."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the folder; `made_as` is its name in the result of its piece's conversion."""

    name: str
    made_as: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ConversionPiece:
    """Whole parameters, or the rows (begin, end) of one parameter, and the tensors that they are converted to."""

    sources: tuple[str, ...]
    makes: tuple[PlannedTensor, ...]
    rows: tuple[int, int] | None = None
    is_same: bool = False
    """The piece is one parameter, which the conversion returns unchanged."""

    @property
    def nbytes(self) -> int:
        return sum(made.nbytes for made in self.makes)


def group_by_layer(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Group consecutive tensors by decoder layer; a tensor outside the layers is a group of its own."""

    def layer(pair: tuple[str, Tensor]) -> str:
        match = re.search(r"^(.*?\.\d+)\.", pair[0])
        return match.group(1) if match else pair[0]

    for _, members in groupby(tensors, key=layer):
        yield dict(members)


def plan_pieces(facts: Mapping[str, tuple[tuple[int, ...], torch.dtype]], convert: Convert) -> list[ConversionPiece]:
    """Plan all pieces of a model from shapes and dtypes alone, in the order of the parameters."""
    empty = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, dtype) in facts.items())
    return [piece for members in group_by_layer(empty) for piece in _plan_layer(members, convert)]


def _plan_layer(members: dict[str, Tensor], convert: Convert) -> list[ConversionPiece]:
    """Plan one layer: parameters that convert alone are pieces of their own, the others are one piece."""
    wanted = convert(members)
    if {name: t.shape for name, t in members.items()} == {name: t.shape for name, t in wanted.items()}:
        return [
            ConversionPiece((name,), _planned_tensors({name: tensor}), is_same=wanted[name] is tensor)
            for name, tensor in members.items()
        ]
    found, together = [], []
    for name, tensor in members.items():
        alone = _convert_alone(name, tensor, convert)
        if alone and all(key in wanted and wanted[key].shape == made.shape for key, made in alone.items()):
            found += _plan_parameter(name, tensor, alone, convert)
        else:
            together.append(name)
    covered = {made.name for piece in found for made in piece.makes}
    rest = {name: tensor for name, tensor in wanted.items() if name not in covered}
    if bool(rest) != bool(together):
        raise RuntimeError(f"cannot match tensors of the model folder to parameters: {sorted(rest) or together}")
    return [*found, ConversionPiece(tuple(together), _planned_tensors(rest))] if rest else found


def _convert_alone(name: str, tensor: Tensor, convert: Convert) -> dict[str, Tensor]:
    """Convert one parameter without the others; empty if it needs them."""
    try:
        return convert({name: tensor})
    except (KeyError, IndexError, ValueError, RuntimeError):  # transformers raises these on too few inputs
        return {}


def _plan_parameter(name: str, tensor: Tensor, alone: dict[str, Tensor], convert: Convert) -> list[ConversionPiece]:
    """Plan a parameter that converts alone: groups of rows for a stack, else one piece."""
    templates = _row_name_templates(name, tensor, alone, convert) if tensor.dim() > 1 and len(alone) > 1 else []
    if not templates:
        return [ConversionPiece((name,), _planned_tensors(alone))]
    count = len(tensor)
    step = max(1, ROWS_BYTES // max(1, tensor[:1].nbytes))
    pieces = []
    for begin in range(0, count, step):
        end = min(begin + step, count)
        makes = [
            PlannedTensor(one.format(row), one.format(row - begin), tuple(alone[one.format(row)].shape), tensor.dtype)
            for row in range(begin, end)
            for one in templates
        ]
        pieces.append(ConversionPiece((name,), tuple(makes), (begin, end)))
    return pieces


def _row_name_templates(name: str, tensor: Tensor, alone: dict[str, Tensor], convert: Convert) -> list[str]:
    """Templates of the names of the tensors that one row of a stack becomes; empty if the parameter is not a stack."""
    count = len(tensor)
    first = _convert_alone(name, tensor[:1], convert)
    templates = []
    for key, made in first.items():
        for match in re.finditer(r"(?<=\.)0(?=\.)", key):
            template = key[: match.start()] + "{}" + key[match.end() :]
            rows = [template.format(row) for row in range(count)]
            if all(row in alone and alone[row].shape == made.shape for row in rows):
                templates.append(template)
                break
    is_whole = len(templates) == len(first) and len(first) * count == len(alone)
    return templates if is_whole else []


def _planned_tensors(tensors: Mapping[str, Tensor]) -> tuple[PlannedTensor, ...]:
    return tuple(PlannedTensor(name, name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
