"""What one rank has of the tensors of a checkpoint, and the files it writes of it.

    {kind}-r{rank:05d}-{i:05d}.safetensors    parts of tensors; the header says of each where it stands

Invariant: the parts that all ranks write of a tensor cover it, each element once. A rank writes what it has, so nothing
is gathered.
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
AGAIN = "#"
"""Stands, with a number, after the name of a tensor of which a rank has more than one part."""


@dataclass(frozen=True)
class Part:
    """A block of a tensor whose whole has `shape`; it begins at `offset`.

    `kind` says what of the state it is, and names the files.
    """

    kind: str
    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def on_host(self) -> Part:
        """A copy that further training does not change."""
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True))


def write_parts(
    folder: Path, rank: int, parts: Iterable[Part], *, added: Callable[[str], None] = lambda _: None
) -> dict[str, int]:
    """Write the parts of one rank, those of one kind after another, durably; the names and sizes of the files.

    At most one file's worth of tensors is held here; `added` hears of each one.
    """
    paths: list[Path] = []
    for kind, members in groupby(parts, key=lambda part: part.kind):
        writer = ShardWriter(folder, prefix=f"{kind}-r{rank:05d}", max_bytes=SHARD_BYTES, dtype=None)
        counts: Counter[str] = Counter()
        for part in members:
            counts[part.name] += 1
            key = part.name if counts[part.name] == 1 else f"{part.name}{AGAIN}{counts[part.name]}"
            writer.add(key, part.tensor, note={"shape": part.shape, "offset": part.offset})
            added(part.name)
        paths += writer.finish()
    return {path.name: path.stat().st_size for path in paths}
