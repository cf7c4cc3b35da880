"""The ranks of a sharded model: who shares samples, and over whom the parameters are cut.

Ranks are numbered with context innermost, then the ranks that share one copy of the model, then the copies. Parameters
are cut over all ranks of a copy, those of a context group too, and equal on the ranks of other copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime.train.topology import Ranks, Topology


@dataclass(frozen=True)
class ShardedTopology:
    """`mesh`: what parameters are cut over; of two dimensions (copies, ranks of one) where there are copies."""

    topology: Topology
    mesh: DeviceMesh


def shard_ranks(world: Ranks) -> ShardedTopology:
    """Every rank has samples of its own and a part of the one copy."""
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    alone = Ranks(0, 1, world.device)
    return ShardedTopology(Topology(world=world, data=world, context=alone, model=alone), mesh)
