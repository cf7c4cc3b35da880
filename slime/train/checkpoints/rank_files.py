"""Writes one rank's parts of the tensors of a checkpoint.

    {kind}-r{rank:05d}-{i:05d}.safetensors    parts of tensors; the header has the position of each part

Invariant: the parts that all ranks write of a tensor cover each of its elements once. A rank writes its own parts, so
nothing is gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from slime.models.saving import ShardWriter

SHARD_BYTES = 1024**3
MODEL, OPTIMIZER = "model", "optim"
"""Kinds of parts; any other is the name of a set of frozen weights."""
PART_SEPARATOR = "#"
"""Separates the name of a tensor and the number of a part, if a rank has more than one part of it."""


@dataclass(frozen=True)
class SavedPart:
    """A block of a tensor of the whole `shape`; it begins at `offset`.

    `kind` is the part of the training state (model, optimizer, a frozen set) and the prefix of the file names.
    """

    kind: str
    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def on_host(self) -> SavedPart:
        """Copy the part to the host, so that further training does not change it."""
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True))


def write_parts(
    folder: Path, rank: int, parts: Iterable[SavedPart], *, added: Callable[[str], None] = lambda _: None
) -> dict[str, int]:
    """Write the parts of one rank durably, one kind after another; return the names and sizes of the files.

    At most the tensors of one file are held in memory; `added` is called with each part's name.
    """
    paths: list[Path] = []
    for kind, members in groupby(parts, key=lambda part: part.kind):
        writer = ShardWriter(folder, prefix=f"{kind}-r{rank:05d}", max_bytes=SHARD_BYTES, dtype=None)
        counts: Counter[str] = Counter()
        for part in members:
            counts[part.name] += 1
            key = part.name if counts[part.name] == 1 else f"{part.name}{PART_SEPARATOR}{counts[part.name]}"
            writer.add(key, part.tensor, note={"shape": part.shape, "offset": part.offset})
            added(part.name)
        paths += writer.finish()
    return {path.name: path.stat().st_size for path in paths}
