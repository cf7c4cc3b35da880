"""The ranks of a sharded model: who shares samples, and over whom the parameters are cut.

Ranks are numbered with context innermost, then the ranks that share one copy of the model, then the copies. Parameters
are cut over all ranks of a copy, those of a context group too, and equal on the ranks of other copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime.train.topology import Ranks, Topology


@dataclass(frozen=True)
class ShardedTopology:
    """`mesh`: what parameters are cut over; of two dimensions (copies, ranks of one) where there are copies."""

    topology: Topology
    mesh: DeviceMesh


def shard_ranks(world: Ranks, *, copy_size: int, context_size: int = 1) -> ShardedTopology:
    """`copy_size` ranks share a copy of the model, `context_size` of these the samples.

    The flags were checked for what must divide what. Ranks form all groups together, in the same order.
    """
    device = world.device
    num_copies = world.size // copy_size
    sizes, names = ((num_copies, copy_size), ("replicate", "shard")) if num_copies > 1 else ((copy_size,), ("shard",))
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    alone = Ranks(0, 1, device)
    if context_size == 1:
        return ShardedTopology(Topology(world=world, data=world, context=alone, model=alone), mesh)
    by_context = [list(range(first, first + context_size)) for first in range(0, world.size, context_size)]
    by_data = [list(range(place, world.size, context_size)) for place in range(context_size)]
    context, data = (Ranks.of(_own_group(groups), device) for groups in (by_context, by_data))
    return ShardedTopology(Topology(world=world, data=data, context=context, model=alone), mesh)


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Of groups that have every rank once, this rank's."""
    own, _ = dist.new_subgroups_by_enumeration(groups)
    assert own is not None
    return own
