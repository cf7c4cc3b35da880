"""Which machines a run is on: this one, or the nodes of a Ray cluster.

Invariant: what the flags and the environment say decides, never what happens to be installed; Ray is imported only
where it was chosen.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from slime.cluster.devices import gpu_count, resolve_device
from slime.cluster.local import LocalCluster
from slime.cluster.node import Cluster
from slime.cluster.remote.placement import NodeFacts
from slime.config import Config
from slime.config.devices import nvidia_gpu_count
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
    return RAY if config.actor_num_nodes > 1 and _wants_gpus(config.device) else LOCAL


def _wants_gpus(device: str) -> bool:
    return device == "cuda" or (device == "auto" and nvidia_gpu_count() > 0)


@dataclass(frozen=True)
class Machines:
    """What a run has to work with: `--device` as "cpu" or "cuda", the GPUs of all machines, and the nodes of a cluster
    (none: this machine)."""

    device: str
    gpus: int
    nodes: tuple[NodeFacts, ...] = ()


def find_machines(config: Config) -> Machines:
    """Look at this machine, or ask the cluster, which must be there."""
    if cluster_kind(config) == LOCAL:
        device = resolve_device(config.device)
        return Machines(device, gpu_count() if device == "cuda" else 0)
    _require_ray()
    from slime.cluster.ray import connected, ray_nodes

    with connected(config.ray_address):
        nodes = tuple(ray_nodes())
    gpus = sum(node.gpus for node in nodes)
    if config.device == "cuda" and not gpus:
        there = ", ".join(node.name for node in nodes)
        raise UserError(f"--device cuda, but no node of the Ray cluster ({there}) has a GPU: use --device cpu or auto")
    device = "cuda" if gpus and config.device != "cpu" else "cpu"
    return Machines(device, gpus if device == "cuda" else 0, nodes)


def open_cluster(config: Config, device: str, *, trainers: int, rollout: int) -> Cluster:
    """Places for so many trainers and for so many GPUs of engines; whoever opens it closes it."""
    if cluster_kind(config) == LOCAL:
        return LocalCluster(config, device=device, trainers=trainers, rollout=rollout)
    _require_ray()
    from slime.cluster.ray import RayCluster

    return RayCluster(config, device=device, trainers=trainers, rollout=rollout)


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UserError("--cluster ray needs Ray, which is not installed: pip install 'slime[ray]', or --cluster local")
