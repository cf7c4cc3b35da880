"""Chooses the machines of a run: this one, or the nodes of a Ray cluster.

Invariant: only the flags and the environment decide, never the installed packages. Ray is imported only when it is
chosen.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from slime.cluster.devices import gpu_count, resolve_device
from slime.cluster.local import LocalCluster
from slime.cluster.node import Cluster
from slime.cluster.remote.placement import NodeInfo
from slime.config import Config
from slime.config.devices import nvidia_gpu_count
from slime.errors import UserError

LOCAL = "local"
RAY = "ray"
ADDRESS_VARIABLE = "RAY_ADDRESS"


def cluster_kind(config: Config) -> str:
    """Return `local` or `ray`. Several training nodes on CPUs are processes of this machine unless Ray is named."""
    if config.cluster is not None:
        return config.cluster
    if config.ray_address is not None or os.environ.get(ADDRESS_VARIABLE):
        return RAY
    if config.actor_num_nodes > 1 and (config.device == "cuda" or (config.device == "auto" and nvidia_gpu_count() > 0)):
        return RAY
    return LOCAL


@dataclass(frozen=True)
class Machines:
    """The resources of a run: `device` ("cpu" or "cuda"), the GPUs of all machines, and the cluster's nodes (none: this
    machine)."""

    device: str
    gpus: int
    nodes: tuple[NodeInfo, ...] = ()


def find_machines(config: Config) -> Machines:
    """Find the resources of this machine, or of the Ray cluster, which must be up."""
    if cluster_kind(config) == LOCAL:
        device = resolve_device(config.device)
        return Machines(device, gpu_count() if device == "cuda" else 0)
    _require_ray()
    from slime.cluster.ray import ray_connection, ray_nodes

    with ray_connection(config.ray_address):
        nodes = tuple(ray_nodes())
    gpus = sum(node.gpus for node in nodes)
    if config.device == "cuda" and not gpus:
        there = ", ".join(node.name for node in nodes)
        raise UserError(f"--device cuda, but no node of the Ray cluster ({there}) has a GPU: use --device cpu or auto")
    device = "cuda" if gpus and config.device != "cpu" else "cpu"
    return Machines(device, gpus if device == "cuda" else 0, nodes)


def open_cluster(config: Config, device: str, *, trainers: int, rollout: int) -> Cluster:
    """Reserve slots for `trainers` processes and `rollout` engine GPUs; the caller closes the cluster."""
    if cluster_kind(config) == LOCAL:
        return LocalCluster(config, device=device, trainers=trainers, rollout=rollout)
    _require_ray()
    from slime.cluster.ray import RayCluster

    return RayCluster(config, device=device, trainers=trainers, rollout=rollout)


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UserError("--cluster ray needs Ray, which is not installed: pip install 'slime[ray]', or --cluster local")
