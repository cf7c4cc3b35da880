"""Small models of every family in Megatron, filled from the folder that transformers wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.train.backends.megatron.layout import Layout
from tests.family_models import family_config

LENGTHS = (8, 4, 12, 8)
"""Of the sequences of a row: what two context-parallel ranks can cut."""


def megatron_sizes(layout: Layout) -> dict[str, int | None]:
    """A layout as `initialize_model_parallel` has it."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def build(folder: Path, layout: Layout, **flags: Any) -> tuple[list[Any], dict[str, Any]]:
    """The stages of this process with the weights of the folder, and the family's fields."""
    from slime.config import Config
    from slime.models.families.family import family_of
    from slime.train.backends.megatron.model import build_stages
    from slime.train.backends.megatron.settings import transformer_config

    hf_config = family_config(folder)
    family = family_of(hf_config)
    fields = family.fields(hf_config)
    config = transformer_config(
        fields, Config(**flags), layout, compute_dtype=torch.float32, device=torch.device("cpu")
    )
    stages = build_stages(config, fields)
    fill(stages, folder, family.rules(hf_config))
    return stages, fields


@torch.no_grad()
def fill(stages: Sequence[Any], folder: Path, rules: Any) -> None:
    from megatron.core import parallel_state as groups
    from safetensors.torch import load_file

    from slime.models.families.rules import entries_by_name
    from slime.train.backends.megatron.names import global_buffers, global_names

    entries = entries_by_name(rules)
    saved: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        saved |= load_file(file)
    for name, target in {**global_names(stages), **global_buffers(stages)}.items():
        entry = entries[name]
        if entry.is_expert:
            rank, size = groups.get_expert_tensor_parallel_rank(), groups.get_expert_tensor_parallel_world_size()
        else:
            rank, size = groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()
        whole = [saved[hf] for hf in entry.hf]
        shard = entry.form.shard([tuple(tensor.shape) for tensor in whole], rank, size)
        assert tuple(target.shape) == tuple(shard.shape), (name, target.shape, shard.shape)
        target.copy_(shard.join([whole[share.source][share.region] for share in shard.shares]))


def tokens(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def own_slices(sequence: Tensor, rank: int, size: int) -> Tensor:
    """The first and last chunk of a sequence that one of `size` context-parallel ranks has."""
    if size == 1:
        return sequence
    chunks = sequence.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def whole_sequence(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `own_slices`, of all ranks."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2) for part in parts]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)])
