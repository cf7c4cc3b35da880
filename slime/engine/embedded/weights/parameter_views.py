"""Views of the model's weights under the names of its Hugging Face folder: writing to one changes the model.

transformers fuses some weights while it loads them (the experts of a layer, for example), so a folder's tensor may be a
part of a parameter. To find the part, the numbers 0, 1, 2, ... are passed, instead of the weights, through
transformers' own conversion back to a folder: the numbers in the result are the positions of its elements.

Invariant: a layout covers every tensor of the folder exactly; a weight that is not a regular part of one parameter
makes the whole layout impossible (`NoLayout`) instead of wrong.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # importing transformers takes longer than a start without it
    from transformers import PreTrainedModel


class NoLayout(ValueError):
    """A weight of the folder is not a part of one parameter."""


@dataclass(frozen=True)
class ParameterPart:
    """A tensor of a folder: elements of the parameter `source` with regular strides."""

    source: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of this part; strides count elements in C order, but a whole tensor may have any order."""
        if self.offset == 0 and self.shape == tuple(tensor.shape) and self.stride == _contiguous_strides(self.shape):
            return tensor
        if not tensor.is_contiguous():
            raise NoLayout(f"{self.source} is not stored in C order")
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


Layout = dict[str, ParameterPart]


class FolderViews:
    """A model's weights by name; the layout is computed when a name of the folder first needs it.

    The names of weights that were `read_directly` from the folder are the folder's.
    """

    def __init__(self, model: PreTrainedModel, *, read_directly: bool = False) -> None:
        self.model = model
        self._is_direct = read_directly
        self._layout: Layout | None = None

    def targets(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the tensors that an update of `names` writes to.

        They are the model's own tensors (tied ones under each name), and parts of them if a name needs these and a
        layout exists.
        """
        own = self.model.state_dict()
        if own.keys() >= set(names):
            return own
        layout = self._known_layout()
        return own if layout is None else own | {name: part.of(own[part.source]) for name, part in layout.items()}

    def missing(self, names: Collection[str]) -> list[str]:
        """List the tensors that an update of `names` does not write, by the folder's names; tied tensors are one."""
        own = self.model.state_dict()
        seen = {_storage_key(own[name]) for name in names if name in own}
        may_lack = () if self._is_direct else self.model._keys_to_ignore_on_load_missing or ()
        optional = [re.compile(pattern) for pattern in may_lack]
        left = set()
        for name, tensor in own.items():
            if _storage_key(tensor) not in seen and not any(pattern.search(name) for pattern in optional):
                left.add(name)
                seen.add(_storage_key(tensor))
        layout = (self._known_layout() if left else None) or {}
        parts = [name for name, part in layout.items() if part.source in left]
        fused = {layout[name].source for name in parts}
        return sorted(name for name in {*parts, *(left - fused)} if name not in names)

    def _known_layout(self) -> Layout | None:
        """The layout, computed once; None if the folder's tensors are not parts of the model's."""
        if self._is_direct:
            return None
        try:
            if self._layout is None:
                self._layout = folder_layout(self.model)
        except NoLayout:
            return None
        return self._layout

    def weights_like(self, other: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return the weights of another model of the same type, under the names of this model's weights."""
        if not self._is_direct:
            return other.state_dict()
        theirs = FolderViews(other).readable()
        return {name: theirs[name] for name in self.model.state_dict()}

    def readable(self) -> dict[str, torch.Tensor]:
        """Return every tensor under its own name and the folder's, possibly as a copy."""
        own = self.model.state_dict()
        return own if self._is_direct else own | _as_in_folder(self.model, dict(own))

    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes of `readable`; reads no weight, so the weights may be released."""
        own = {name: torch.empty(each.shape, device="meta") for name, each in self.model.state_dict().items()}
        found = own if self._is_direct else own | _as_in_folder(self.model, dict(own))
        return {name: list(tensor.shape) for name, tensor in found.items()}


def folder_layout(model: PreTrainedModel) -> Layout:
    """Find the part of the model that each tensor of its folder is; layers of one shape are analysed once."""
    layout: Layout = {}
    known: dict[tuple[tuple[str, tuple[int, ...]], ...], Layout] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for prefix, members in groupby(shapes, key=lambda name: re.sub(r"^(.*?\.\d+\.)?.*", r"\1", name)):
        own = {name: shapes[name] for name in members}
        form = tuple((name.removeprefix(prefix), shape) for name, shape in own.items())
        if form not in known:
            found = _group_layout(model, own)
            known[form] = {
                name.removeprefix(prefix): replace(part, source=part.source.removeprefix(prefix))
                for name, part in found.items()
            }
        layout |= {prefix + name: replace(part, source=prefix + part.source) for name, part in known[form].items()}
    return layout


def _group_layout(model: PreTrainedModel, shapes: dict[str, tuple[int, ...]]) -> Layout:
    """Compute the layout of tensors that are converted together."""
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    kept = set(_as_in_folder(model, empty)) & set(shapes)
    layout = {
        name: ParameterPart(name, shapes[name], _contiguous_strides(shapes[name]), 0) for name in shapes if name in kept
    }
    fused = [name for name in shapes if name not in kept]
    counts = [torch.Size(shapes[name]).numel() for name in fused]
    starts = [0, *itertools.accumulate(counts)]
    kind = torch.int32 if starts[-1] < 1 << 31 else torch.int64
    numbered = {
        name: torch.arange(start, start + count, dtype=kind).view(shapes[name])
        for name, start, count in zip(fused, starts[:-1], counts, strict=True)
    }
    for name, numbers in (_as_in_folder(model, dict(numbered)) if fused else {}).items():
        source = fused[bisect.bisect_right(starts, int(numbers[(0,) * numbers.dim()])) - 1]
        layout[name] = _find_part(name, numbers, source, numbered[source])
    return layout


def _as_in_folder(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return found


def _find_part(name: str, numbers: torch.Tensor, source: str, whole: torch.Tensor) -> ParameterPart:
    """Return the part of `whole`, which counts up in C order, that has exactly the elements `numbers`."""
    first = numbers[(0,) * numbers.dim()]
    stride = tuple(int(numbers.select(d, 1)[(0,) * (numbers.dim() - 1)] - first) if size > 1 else 1
                   for d, size in enumerate(numbers.shape))  # fmt: skip
    part = ParameterPart(source, tuple(numbers.shape), stride, int(first - whole[(0,) * whole.dim()]))
    last = part.offset + sum(step * (size - 1) for step, size in zip(stride, numbers.shape, strict=True))
    if min(stride, default=1) < 0 or last >= whole.numel() or not torch.equal(part.of(whole), numbers):
        raise NoLayout(f"{name} is not a regular part of {source}")
    return part


def _storage_key(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
