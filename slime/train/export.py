"""Training weights as Hugging Face tensors.

Invariant: the names and shapes are those of the model folder a run started from (fused parameters are taken apart
again), every tied weight appears once, and at most one layer and one bucket are whole in memory at a time. All ranks
walk through together; rank 0 has the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from slime.models.shards import ShardWriter
from slime.train.backends.protocol import NamedTensor, TrainBackend


def hf_tensors(backend: TrainBackend) -> Iterator[NamedTensor]:
    """Whole tensors under their names in a model folder."""
    for _, members in groupby(backend.full_parameters(), key=lambda pair: _layer_of(pair[0])):
        yield from _as_in_folder(backend.module.model, dict(members)).items()


def export_weights(
    backend: TrainBackend, folder: Path, *, version: int, dtype: torch.dtype, buffer_size: int
) -> list[Path]:
    """Write `weights-v{version}-{i}.safetensors` buckets of at most `buffer_size` bytes; rank 0 returns their paths."""
    tensors = hf_tensors(backend)
    if backend.ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        writer = ShardWriter(folder, prefix=f"weights-v{version:06d}", max_bytes=buffer_size, dtype=dtype, sync=False)
        for name, tensor in tensors:
            writer.add(name, tensor)
        return writer.finish()
    for _ in tensors:
        pass
    return []


def _layer_of(name: str) -> str:
    match = re.search(r"^(.*?\.\d+)\.", name)
    return match.group(1) if match else name


def _as_in_folder(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers may fuse weights while loading (experts of one layer, say); this undoes it for one layer."""
    return revert_weight_conversion(model, tensors)
