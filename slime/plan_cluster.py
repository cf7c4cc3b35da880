"""On which machines a planned run is, and whether they have room for it.

Invariant: what a cluster cannot place is refused here, with what is missing on which node, before anything starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.cluster.choose import RAY, Machines, cluster_kind, find_machines
from slime.cluster.remote.bundles import ENGINE, TRAINER, NodeFacts, fit, make_bundles
from slime.config import Config
from slime.config.gpus import nvidia_gpu_count
from slime.config.planned_cluster import PlannedCluster
from slime.errors import UserError


def planned_machines(config: Config) -> Machines:
    """What a dry run is about, as far as that can be told without torch; a Ray cluster is asked."""
    if config.plan_cluster is not None:
        return Machines("cuda", PlannedCluster.parse(config.plan_cluster).gpus)
    if cluster_kind(config) == RAY:
        return find_machines(config)
    gpus = nvidia_gpu_count()
    device = config.device if config.device != "auto" else "cuda" if gpus else "cpu"
    return Machines(device, gpus)


@dataclass(frozen=True)
class PlannedNodes:
    """The nodes of a cluster that get something to do, a row for each; none for a run on this machine."""

    rows: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[str, ...] = ()
    """Those of them that are not the driver's machine."""


def plan_nodes(config: Config, device: str, nodes: Sequence[NodeFacts], *, trainers: int, rollout: int) -> PlannedNodes:
    """Who probably sits where: Ray decides when the run starts."""
    if not nodes:
        return PlannedNodes(elsewhere=_other_planned(config, trainers, rollout))
    bundles = make_bundles(config, device, nodes, trainers=trainers, rollout=rollout)
    places = fit(bundles, nodes, device)
    unit = "GPU" if device == "cuda" else "CPU"
    names = {TRAINER: "trainers and engines" if config.colocate and rollout else "trainers", ENGINE: "engines"}
    rows = []
    for node in dict.fromkeys(places):
        here = [bundle for bundle, place in zip(bundles, places, strict=True) if place == node]
        counts = {role: sum(bundle.count for bundle in here if bundle.role == role) for role in (TRAINER, ENGINE)}
        given = [
            f"{count} {unit}{'s' if count > 1 else ''} for {names[role]}" for role, count in counts.items() if count
        ]
        rows.append((f"node {node.name}", f"{', '.join(given)} (has {node.devices(device)}, at {node.address})"))
    return PlannedNodes(tuple(rows), tuple(node.name for node in dict.fromkeys(places) if not node.is_here))


def _other_planned(config: Config, trainers: int, rollout: int) -> tuple[str, ...]:
    """The nodes of --plan-cluster that such a run would be on, without the first."""
    if config.plan_cluster is None:
        return ()
    devices = max(trainers, rollout) if config.colocate else trainers + rollout
    used = max(config.actor_num_nodes, -(-devices // PlannedCluster.parse(config.plan_cluster).gpus_per_node))
    return tuple(f"node {number}" for number in range(2, used + 1))


def check_one_machine(config: Config, device: str, nodes: Sequence[NodeFacts]) -> None:
    """Several training nodes of GPUs need a cluster."""
    if device == "cuda" and config.actor_num_nodes > 1 and not nodes and config.plan_cluster is None:
        raise UserError(
            f"--actor-num-nodes {config.actor_num_nodes} with --cluster local: this machine is one node; use --cluster "
            "ray, or --actor-num-gpus-per-node alone"
        )
