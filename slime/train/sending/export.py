"""Training weights as Hugging Face tensors.

Invariant: the names and shapes are those of the model folder a run started from (fused parameters are taken apart
again), every tied weight appears once, and at most one layer and one bucket are whole in memory at a time. All ranks
walk through together; rank 0 has the tensors.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import torch

from slime.errors import RunFailed
from slime.models.shards import ShardWriter
from slime.train.backends.protocol import NamedTensor, TrainBackend
from slime.train.checkpoints.not_written import written_together


def hf_tensors(backend: TrainBackend) -> Iterator[NamedTensor]:
    """Whole tensors under their names in a model folder."""
    for members in by_layer(backend.local_parameters()):
        gathered = {name: backend.gather_part(name, part) for name, part in members.items()}
        yield from backend.as_in_folder(gathered).items()


def hf_layout(backend: TrainBackend, dtype: torch.dtype) -> list[NamedTensor]:
    """What `hf_tensors` yields, in its order and as the engines get it, on the meta device: nothing is gathered."""
    empty = (
        (name, torch.empty(shape, dtype=rollout_dtype(kind, dtype), device="meta"))
        for name, (shape, kind) in backend.parameter_facts().items()
    )
    return [pair for members in by_layer(empty) for pair in backend.as_in_folder(members).items()]


def export_weights(
    backend: TrainBackend, folder: Path, *, version: int, dtype: torch.dtype, buffer_size: int
) -> list[Path]:
    """Write `weights-v{version}-{i}.safetensors` buckets of at most `buffer_size` bytes; rank 0 returns their paths."""
    paths: list[Path] = []

    def write(tensors: Iterator[NamedTensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"weights-v{version:06d}"
        writer = ShardWriter(folder, prefix=prefix, max_bytes=buffer_size, dtype=dtype, sync=False)
        for name, tensor in tensors:
            writer.add(name, tensor)
        paths.extend(writer.finish())

    world = backend.topology.world
    tensors = backend.progress.over(hf_tensors(backend), "writing weights: tensor")
    written_together(world, tensors, write if world.rank == 0 else None, _what(folder, version))
    return paths


def not_written(folder: Path, version: int, cause: Exception) -> RunFailed:
    """The sentence for files that could not be written."""
    return RunFailed(f"cannot write {_what(folder, version)}: {cause}")


def _what(folder: Path, version: int) -> str:
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    return (
        f"version {version} of the weights to {folder} ({free / 2**30:.2f} GiB free there; --update-weight-transport "
        "disk and --update-weight-disk-dir choose another place)"
    )


def rollout_dtype(found: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Floating tensors travel in the rollout's dtype, others in their own."""
    return dtype if found.is_floating_point else found


def by_layer(tensors: Iterable[NamedTensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of one decoder layer at a time, and others one by one."""
    for _, members in groupby(tensors, key=lambda pair: _layer_of(pair[0])):
        yield dict(members)


def _layer_of(name: str) -> str:
    match = re.search(r"^(.*?\.\d+)\.", name)
    return match.group(1) if match else name
