"""The tensors of a distributed checkpoint, whole or any part of them, whoever wrote which block.

Invariant: a part is read from the blocks it touches and from no others. A block is read as numbers only
(`weights_only`); one that is cut off or of another shape than the index says is a `UserError`.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slime.errors import UserError
from slime.models.regions import Region, overlap, region_shape, within
from slime.models.torch_dist.index import Block, Indexed, read_index


class TorchDist:
    """One `iter_...` or `release` folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors = read_index(folder)

    @property
    def keys(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def source(self, key: str) -> StoredBlocks:
        """One of its tensors, to read parts of."""
        return StoredBlocks(key, self._tensors[key])


@dataclass(frozen=True)
class StoredBlocks:
    """A tensor in blocks, as a source of numbers."""

    key: str
    indexed: Indexed

    @property
    def shape(self) -> tuple[int, ...]:
        return self.indexed.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.indexed.dtype

    def read(self, region: Region) -> Tensor:
        result, filled = torch.empty(region_shape(region), dtype=self.dtype), 0
        for block in self.indexed.blocks:
            held = tuple(slice(begin, begin + size) for begin, size in zip(block.offset, block.size, strict=True))
            common = overlap(held, region)
            if common is not None:
                result[within(common, region)] = self._load(block)[within(common, held)]
                filled += math.prod(region_shape(common))
        if filled != result.numel():
            raise UserError(f"the checkpoint has {filled} of {result.numel()} numbers of {self.key}: choose another")
        return result

    def _load(self, block: Block) -> Tensor:
        try:
            with block.path.open("rb") as file:
                file.seek(block.begin)
                raw = file.read(block.length)
        except OSError as cause:
            raise UserError(f"{block.path} cannot be read: {cause.strerror}") from cause
        if len(raw) < block.length:
            raise UserError(f"{block.path} ends before {self.key} does: copy the checkpoint again")
        try:
            found = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as cause:
            raise UserError(f"{self.key} in {block.path} is no tensor: the checkpoint is damaged") from cause
        if not isinstance(found, Tensor) or tuple(found.shape) != block.size or found.dtype != self.dtype:
            raise UserError(f"{self.key} in {block.path} is not what the index says: the checkpoint is damaged")
        return found
