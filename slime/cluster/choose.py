"""Which machines a run is on: this one, or the nodes of a Ray cluster.

Invariant: what the flags and the environment say decides, never what happens to be installed; Ray is imported only
where it was chosen.
"""

from __future__ import annotations

import os

from slime.cluster.devices import gpu_count, resolve_device
from slime.cluster.local import LocalCluster
from slime.cluster.node import Cluster
from slime.config import Config
from slime.errors import UserError

LOCAL = "local"
RAY = "ray"
ADDRESS_VARIABLE = "RAY_ADDRESS"


def cluster_kind(config: Config) -> str:
    """`local` or `ray`. Several training nodes on a CPU are processes of this machine unless Ray is named."""
    if config.cluster is not None:
        return config.cluster
    if config.ray_address is not None or os.environ.get(ADDRESS_VARIABLE):
        return RAY
    return RAY if config.actor_num_nodes > 1 and config.device == "cuda" else LOCAL


def cluster_device(config: Config) -> tuple[str, int]:
    """`--device` as "cpu" or "cuda", and how many GPUs there are, here or in the cluster."""
    if cluster_kind(config) == RAY:
        raise UserError("--cluster ray is not in this version: use --cluster local")
    device = resolve_device(config.device)
    return device, gpu_count() if device == "cuda" else 0


def open_cluster(config: Config, device: str, *, trainers: int, rollout: int) -> Cluster:
    """Places for so many trainers and for so many GPUs of engines; whoever opens it closes it."""
    return LocalCluster(config, device=device, trainers=trainers, rollout=rollout)
