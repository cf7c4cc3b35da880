"""Megatron's process groups, as the `Ranks` and `Topology` of training.

Megatron keeps its groups in global state. They are created once, and shard every model of a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state

from slime.train.backends.megatron.layout import Layout
from slime.train.topology import COLLECTIVE_MINUTES, Ranks, Topology


@dataclass(frozen=True)
class MegatronGroups:
    """The process groups of a run.

    `tensor`: ranks with other parts of the same matrices. `expert_tensor`: the same for the matrices of experts.
    `pipeline`: ranks with other layers, in the order of the layers.
    """

    layout: Layout
    topology: Topology
    tensor: Ranks
    expert_tensor: Ranks
    pipeline: Ranks

    @property
    def is_last_stage(self) -> bool:
        return self.topology.is_last_stage


def form_groups(layout: Layout, world: Ranks) -> MegatronGroups:
    """Create Megatron's process groups. All ranks call it together."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=COLLECTIVE_MINUTES,
        create_gloo_process_groups=False,
    )

    def ranks(group: dist.ProcessGroup) -> Ranks:
        return Ranks.of(group, world.device)

    topology = Topology(
        world=world,
        data=ranks(parallel_state.get_data_parallel_group()),
        context=ranks(parallel_state.get_context_parallel_group()),
        model=ranks(parallel_state.get_model_parallel_group()),
        is_last_stage=parallel_state.get_pipeline_model_parallel_rank() == layout.pipeline - 1,
    )
    return MegatronGroups(
        layout,
        topology,
        tensor=ranks(parallel_state.get_tensor_model_parallel_group()),
        expert_tensor=ranks(parallel_state.get_expert_tensor_parallel_group()),
        pipeline=ranks(parallel_state.get_pipeline_model_parallel_group()),
    )
