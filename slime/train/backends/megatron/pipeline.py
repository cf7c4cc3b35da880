"""Forward and backward of micro-batches through the stages of a pipeline, by Megatron's schedules.

Invariant: gradients of the objective's losses are summed over micro-batches, data ranks and context ranks, and never
divided. The objective is called on the last stage only, once per micro-batch and in their order. Interleaved stages
take micro-batches in groups; dummy rows of two tokens, whose output is not used, fill the last group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from slime.train.backend import ObjectiveInput
from slime.train.backends.megatron.cp_rows import RowSlices, slice_row
from slime.train.backends.megatron.embedding_and_head import Head
from slime.train.backends.megatron.process_groups import MegatronGroups
from slime.train.backends.megatron.routing_replay import MegatronRoutingReplay
from slime.train.backends.megatron.spec.attention import PackedRowParams
from slime.train.samples.micro_batch import MicroBatch
from slime.train.samples.packing import PackedRow, pack
from slime.train.timers import RankProgress

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

ComputeLoss = Callable[[MicroBatch, Tensor, Tensor], Tensor]
"""Called with (micro-batch, the head's numbers, entropies); returns the loss."""

LossOutput = tuple[Tensor, Tensor, dict[str, object]]
"""What Megatron's schedules expect of a loss function: (loss, number of tokens to divide it by, values to report)."""


@dataclass(frozen=True)
class StagedModel:
    """This rank's stages of one model.

    Megatron's schedules call `wrapped`: the stages themselves, or the stages wrapped for the reduction of gradients.
    """

    stages: list[GPTModel]
    wrapped: list[nn.Module]
    head: Head
    groups: MegatronGroups
    routers: MegatronRoutingReplay | None = None
    """Set if the routers of experts replay the routing of micro-batches."""

    @property
    def config(self) -> TransformerConfig:
        return self.stages[0].config


def run_passes(
    model: StagedModel,
    micro_batches: Sequence[MicroBatch],
    finish: ComputeLoss,
    progress: RankProgress,
    *,
    reads: ObjectiveInput,
    entropy: bool,
    forward_only: bool,
) -> None:
    """Run the micro-batches through the stages; the last stage calls `finish` with the head's numbers of each."""
    layout = model.groups.layout
    rows: list[tuple[MicroBatch | None, PackedRow]] = [(micro, micro.row) for micro in micro_batches]
    if layout.virtual > 1:
        dummy = (None, pack([np.zeros(2, dtype=np.int64)], [1], model.groups.topology.device))
        rows += [dummy] * (-len(rows) % model.config.microbatch_group_size_per_vp_stage)

    def head(micro: MicroBatch | None, slices: RowSlices, output: Tensor) -> LossOutput:
        none = torch.zeros((), dtype=torch.int, device=output.device)
        if micro is None:
            return output.sum() * 0.0, none, {}
        values, entropies = model.head(model.stages[-1], output, slices, model.groups, reads=reads, entropy=entropy)
        return finish(micro, values, entropies), none, {}

    def step(
        batches: Iterator[tuple[MicroBatch | None, PackedRow]], stage: nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
        micro, row = next(batches)
        slices, place = slice_row(row, layout, model.groups.topology.context.rank), model.wrapped.index(stage)
        if model.routers is not None:
            routing = None if micro is None else micro.routing
            model.routers.begin(place, routing, slices, counts=not forward_only)
        output = stage(
            input_ids=slices.tokens,
            position_ids=slices.position_ids,
            attention_mask=None,
            packed_seq_params=PackedRowParams.of(slices.layout, on_host=model.config.transformer_impl == "local"),
        )
        if model.routers is not None:
            model.routers.keep(place)
        if micro is not None and stage is model.wrapped[-1]:
            progress.tick()
        return output, partial(head, micro, slices)

    if model.routers is not None:
        model.routers.forget()
    several = layout.virtual > 1
    run = get_forward_backward_func(layout.pipeline, layout.virtual if several else None)
    run(
        forward_step_func=step,
        data_iterator=[iter(rows) for _ in model.wrapped] if several else iter(rows),
        model=model.wrapped if several else model.wrapped[0],
        num_microbatches=len(rows),
        seq_length=1,  # every transfer sends its own length
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if model.routers is not None:
        model.routers.forget()


def broadcast_from_last_stage(found: list[Tensor], counts: Sequence[int], groups: MegatronGroups) -> list[Tensor]:
    """Broadcast the numbers of all micro-batches from the last stage to every stage."""
    pipeline = groups.pipeline
    if pipeline.size == 1:
        return found
    flat = torch.cat(found) if groups.is_last_stage else torch.empty(sum(counts), device=pipeline.device)
    assert pipeline.group is not None
    dist.broadcast(flat, group=pipeline.group, group_src=pipeline.size - 1)
    return list(flat.split(list(counts)))
