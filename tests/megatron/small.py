"""Builds small Megatron models of every family with the weights of a transformers folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.train.backends.megatron.layout import Layout
from slime.train.samples.packing import PackedLayout
from tests.family_models import family_config

LENGTHS = (8, 4, 12, 8)
"""Sequence lengths of a row; multiples of 4, as two context-parallel ranks need."""


def megatron_sizes(layout: Layout) -> dict[str, int | None]:
    """Arguments of `initialize_model_parallel` for a layout."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def build(folder: Path, layout: Layout, **flags: Any) -> tuple[list[Any], dict[str, Any]]:
    """Build this process's stages with the weights of the folder; return them and the family's fields."""
    from slime.config import Config
    from slime.models.families.family import family_of
    from slime.train.backends.megatron.builder import build_stages
    from slime.train.backends.megatron.config import transformer_config

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
    """Copy the folder's tensors into all parameters and buffers of this rank."""
    from slime.train.backends.megatron.weights import global_buffers, global_names

    wanted = local_tensors(folder, rules, {**global_names(stages), **global_buffers(stages)})
    for target, found in wanted.values():
        target.copy_(found)


def local_tensors(folder: Path, rules: Any, named: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of given tensor and this rank's part of the folder's tensors, by name."""
    from slime.models.families.weight_map import entries_by_name

    entries, saved = entries_by_name(rules), saved_tensors(folder)
    found = {}
    for name, target in named.items():
        whole = [saved[hf] for hf in entries[name].hf]
        shard = shard_of(entries[name], [tuple(tensor.shape) for tensor in whole])
        assert tuple(target.shape) == tuple(shard.shape), (name, target.shape, shard.shape)
        found[name] = target, shard.join([whole[share.source][share.region] for share in shard.shares])
    return found


def tokens(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def own_slices(sequence: Tensor, rank: int, size: int) -> Tensor:
    """The two chunks of a sequence that context-parallel rank `rank` of `size` holds, one from each half."""
    if size == 1:
        return sequence
    chunks = sequence.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def whole_sequence(parts: Sequence[Tensor]) -> Tensor:
    """Inverse of `own_slices`: join the slices of all ranks."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2) for part in parts]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)])


def through(stages: list[Any], sequences: Sequence[Tensor], layout: Layout) -> Tensor | None:
    """Pass sequences as one packed row through all stages of all processes.

    Returns this rank's logits of its tokens [1, t, v] on the last stage, None elsewhere.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as groups

    from slime.train.backends.megatron.spec.attention import PackedRowParams
    from slime.train.backends.megatron.weights import unwrap_stage

    lengths = tuple(len(sequence) for sequence in sequences)
    bounds = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")  # meta: no layer may read them
    params = PackedRowParams.of(PackedLayout(lengths, bounds, max(lengths)), on_host=True)
    own = [own_slices(sequence, groups.get_context_parallel_rank(), layout.context) for sequence in sequences]
    ids = torch.cat(own)[None]
    rank, size = groups.get_pipeline_model_parallel_rank(), layout.pipeline
    shared = layout.tensor if layout.sequence_parallel else 1
    output, states = None, torch.empty(ids.shape[1] // shared, 1, unwrap_stage(stages[0]).config.hidden_size)
    for number in range(len(stages) * size):
        stage = stages[number // size]
        if number % size == rank:
            unwrap_stage(stage).set_input_tensor(states)
            output = stage(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=params)
            if not unwrap_stage(stage).post_process:
                states = output.contiguous()
        if number + 1 < len(stages) * size:
            dist.broadcast(states, group=groups.get_pipeline_model_parallel_group(), group_src=number % size)
    return output if unwrap_stage(stages[-1]).post_process else None


def shard_of(entry: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
    """This rank's shard of a parameter."""
    from megatron.core import parallel_state as groups

    if entry.is_expert:
        rank, size = groups.get_expert_tensor_parallel_rank(), groups.get_expert_tensor_parallel_world_size()
    else:
        rank, size = groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()
    return entry.form.shard(shapes, rank, size)


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
