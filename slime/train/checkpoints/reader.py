"""Reads whole tensors or any block of them from a checkpoint, independently of the ranks that wrote it.

    {kind}-r{rank:05d}-{i:05d}.safetensors    format 2: parts of tensors (`slime.train.checkpoints.rank_files`)
    {kind}-{i:05d}.safetensors                format 1: whole tensors

Invariant: tensors are read bit for bit as they were written, for any number of ranks on either side; reading a block
reads only its bytes. A file that is truncated, missing or invalid raises `UserError`; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from slime.errors import UserError
from slime.models.safetensors_io import natural_order
from slime.models.saving import NOTES
from slime.train.checkpoints.rank_files import PART_SEPARATOR

OPEN_FILES = 64
"""Maximum number of open files: the parts of many ranks may be more files than a process can open."""

Box = tuple[tuple[int, int], ...]
"""A block of a tensor: begin and end in each dimension."""


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a checkpoint, as a `Source`."""

    saved: SavedTensors
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, region: tuple[slice, ...]) -> torch.Tensor:
        """Read a region to the host."""
        part = torch.empty([cut.stop - cut.start for cut in region], dtype=self.dtype)
        self.saved.read_into(self.name, part, [cut.start for cut in region])
        return part


class SavedTensors:
    """The tensors of one kind (`model`, `optim`, `ref`, ...); names are in the order of the layers."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, list[tuple[Path, str, Box]]] = {}
        self._open: OrderedDict[Path, safe_open] = OrderedDict()
        for path in sorted(folder.glob(f"{kind}-*.safetensors")):
            self._index_file(path)
        self.names = sorted(self._places, key=natural_order)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self[name]) for name in self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return self._shapes[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read the whole tensor, in its saved dtype."""
        path, key, box = self._places[name][0]
        with self._explain_errors():
            first = self._file(path).get_tensor(key)
        if box == _box((0,) * len(box), self.shape(name)):
            return first
        whole = torch.empty(self.shape(name), dtype=first.dtype)
        self.read_into(name, whole)
        return whole

    @torch.no_grad()
    def read_into(self, name: str, target: torch.Tensor, offset: Sequence[int] | None = None) -> None:
        """Overwrite `target`, on any device and of any dtype, with the block of its shape that begins at `offset`."""
        if name not in self._places:
            raise self._damaged(f"lacks {name}")
        begin = tuple(offset) if offset is not None else (0,) * target.dim()
        wanted, whole = _box(begin, target.shape), _box((0,) * len(self.shape(name)), self.shape(name))
        if len(wanted) != len(whole) or _intersection(wanted, whole) != wanted:
            raise ValueError(f"{name} of shape {self.shape(name)} has no block {wanted}")
        filled = 0
        for path, key, box in self._places[name]:
            common = _intersection(box, wanted)
            if _volume(common):
                with self._explain_errors():
                    file = self._file(path)
                    block = file.get_tensor(key) if common == box else file.get_slice(key)[_slices(common, box)]
                    target[_slices(common, wanted)].copy_(block)
                filled += _volume(common)
        if filled != target.numel():
            raise self._damaged(f"has {filled} of {target.numel()} numbers of {name}")

    def source(self, name: str, dtype: torch.dtype) -> SavedTensor:
        """Return a source that reads parts of one tensor in `dtype`."""
        if name not in self._places:
            raise self._damaged(f"lacks {name}")
        return SavedTensor(self, name, self.shape(name), dtype)

    def _file(self, path: Path) -> safe_open:
        """Open a file, or return the open one; the least recently used file is dropped."""
        file = self._open.pop(path, None) or safe_open(path, framework="pt")
        self._open[path] = file
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)
        return file

    def _index_file(self, path: Path) -> None:
        """Index the parts in a file from its header."""
        with self._explain_errors():
            file = self._file(path)
            sizes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            notes = (file.metadata() or {}).get(NOTES)
        try:
            placed = None
            if notes is not None:  # the whole shape and the offset of each part
                placed = {
                    name: tuple(tuple(int(number) for number in note[key]) for key in ("shape", "offset"))
                    for name, note in json.loads(notes).items()
                }
            for key, size in sizes.items():
                shape, offset = (size, (0,) * len(size)) if placed is None else placed[key]
                name = key.partition(PART_SEPARATOR)[0]
                box = _box(offset, size)
                if (
                    not len(shape) == len(offset) == len(size)
                    or _intersection(box, _box((0,) * len(shape), shape)) != box
                ):
                    raise ValueError(f"{name} {box} is not a block of {shape}")
                if self._shapes.setdefault(name, shape) != shape:
                    raise ValueError(f"{name} is {shape} here and {self._shapes[name]} in another file")
                self._places.setdefault(name, []).append((path, key, box))
        except (ValueError, TypeError, KeyError, AttributeError) as cause:
            raise self._damaged(f"has a header in {path.name} that cannot be read ({cause})") from cause

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Convert read errors to UserError."""
        try:
            yield
        except (SafetensorError, OSError) as cause:
            raise self._damaged(f"cannot be read ({cause})") from cause

    def _damaged(self, what: str) -> UserError:
        return UserError(f"checkpoint {self.folder} {what}: it is damaged, choose another iteration")


def _box(offset: Sequence[int], size: Sequence[int]) -> Box:
    """Make a box from its offset and size."""
    return tuple((begin, begin + length) for begin, length in zip(offset, size, strict=True))


def _intersection(one: Box, other: Box) -> Box:
    """Return the intersection of two boxes; its `_volume` is 0 if they are disjoint."""
    pairs = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return tuple((begin, max(begin, end)) for begin, end in pairs)


def _volume(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


def _slices(box: Box, within: Box) -> tuple[slice, ...]:
    """Return the box as slices of a tensor that covers the box `within`."""
    return tuple(slice(begin - start, end - start) for (begin, end), (start, _) in zip(box, within, strict=True))
