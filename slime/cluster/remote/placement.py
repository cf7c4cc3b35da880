"""Groups the devices of a run into bundles that must be on one node, and fits them to a cluster's nodes.

Invariant: a bundle is never split. A training node's processes are one bundle; so are the GPUs of an engine, up to the
size of the largest node. If no node fits a bundle, the error says what is missing on which node, before anything waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.config import Config
from slime.errors import UserError

TRAINER = "trainer"
ENGINE = "engine"


@dataclass(frozen=True)
class NodeInfo:
    """A node of a cluster as reported by its scheduler; `is_here` marks the driver's own."""

    id: str
    name: str
    address: str
    cpus: int
    gpus: int
    is_here: bool = False

    def devices(self, device: str) -> int:
        """Return how many processes, each with its own device, the node can run."""
        return self.gpus if device == "cuda" else self.cpus


@dataclass(frozen=True)
class Bundle:
    """`count` devices on one node, for trainers (and the engines that share them) or for one engine."""

    role: str
    count: int


def make_bundles(
    config: Config, device: str, nodes: Sequence[NodeInfo], *, trainers: int, rollout: int
) -> tuple[Bundle, ...]:
    """Return the bundles: training nodes first, then engines that do not share devices with them."""
    per_node = config.actor_num_gpus_per_node
    bundles = [Bundle(TRAINER, min(per_node, trainers - first)) for first in range(0, trainers, per_node)]
    left = max(0, rollout - trainers) if config.colocate else rollout
    largest = max((node.devices(device) for node in nodes), default=0) or 1
    while left > 0:
        engine = min(config.rollout_num_gpus_per_engine, left)
        left -= engine
        bundles += [Bundle(ENGINE, min(largest, engine - first)) for first in range(0, engine, largest)]
    return tuple(bundles)


def fit(bundles: Sequence[Bundle], nodes: Sequence[NodeInfo], device: str) -> tuple[NodeInfo, ...]:
    """Choose a node for each bundle, placing the largest first; a `UserError` says what is missing where."""
    free = {node.id: node.devices(device) for node in nodes}
    taken: dict[str, list[Bundle]] = {node.id: [] for node in nodes}
    found: dict[int, NodeInfo] = {}
    for place in sorted(range(len(bundles)), key=lambda place: -bundles[place].count):
        bundle = bundles[place]
        able = [node for node in nodes if free[node.id] >= bundle.count]
        if not able:
            raise UserError(_format_missing(bundle, nodes, taken, device))
        node = min(able, key=lambda node: (not taken[node.id], free[node.id]))  # fill up before the next one
        free[node.id] -= bundle.count
        taken[node.id].append(bundle)
        found[place] = node
    return tuple(found[place] for place in range(len(bundles)))


def _format_missing(bundle: Bundle, nodes: Sequence[NodeInfo], taken: dict[str, list[Bundle]], device: str) -> str:
    unit = "GPU" if device == "cuda" else "CPU"
    what = {TRAINER: "a training node", ENGINE: "an engine"}[bundle.role]
    flags = {
        TRAINER: "--actor-num-nodes or --actor-num-gpus-per-node",
        ENGINE: "--rollout-num-gpus or --rollout-num-gpus-per-engine",
    }
    there = []
    for node in [node for node in nodes if node.devices(device)] or nodes:
        total = node.devices(device)
        counts = {role: sum(one.count for one in taken[node.id] if one.role == role) for role in (TRAINER, ENGINE)}
        uses = " and ".join(f"{count} for {role}s" for role, count in counts.items() if count)
        there.append(f"{node.name} has {total} {unit}{'' if total == 1 else 's'}" + (f" ({uses})" if uses else ""))
    return (
        f"{what} needs {bundle.count} {unit}{'s' if bundle.count > 1 else ''} on one node, but no node of the Ray "
        f"cluster has enough left: {'; '.join(there) or 'no node is alive'}: lower {flags[bundle.role]}, or add nodes"
    )
