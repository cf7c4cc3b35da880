"""Runs on the nodes of a Ray cluster. The only file that imports Ray.

Invariant: Ray assigns slots and carries messages; only one agent per node runs inside it. One placement group holds all
devices of the run, ordered by node and device; a request that the cluster cannot satisfy fails before anything waits.
The driver's own node needs no agent: its processes are children of the driver, as without Ray.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import signal
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slime.cluster.local import LocalNode
from slime.cluster.node import Node, NodeLost, Slot, SlotPlacement
from slime.cluster.ports import is_loopback
from slime.cluster.remote.agent import OK, USER_ERROR
from slime.cluster.remote.files import copy_code_to_node, copy_to_node
from slime.cluster.remote.node import NodeTimeout, RemoteNode
from slime.cluster.remote.placement import ENGINE, TRAINER, Bundle, NodeInfo, fit, make_bundles
from slime.cluster.remote.probe import agent_class, package_digest
from slime.cluster.rpc.connect import Listener
from slime.cluster.watchdog import WaitTimeout, expired, waiting
from slime.config import Config
from slime.errors import RunFailed, UserError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

PACKAGE = Path(__file__).resolve().parents[1]
REQUIRED_PACKAGES = ("torch", "transformers", "safetensors", "msgpack", "numpy", "aiohttp", "psutil")
"""Packages that a node must have in addition to slime itself, which the run copies there."""
ANSWER_S = 120.0
PLACEMENT_TIMEOUT_S = 600.0
SPARE_WAIT_S = 3.0
COPY_TIMEOUT_S = 600.0
AGENT_THREADS = 16

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def ray_connection(address: str | None) -> Iterator[None]:
    """Connect to the Ray cluster at the address, at `RAY_ADDRESS`, or of this machine, while the body runs.

    If the process is connected already, it keeps that connection.
    """
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    flag = "--ray-address" if address is not None or "RAY_ADDRESS" not in os.environ else "RAY_ADDRESS"
    _check_reachable(where, flag)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=where, log_to_driver=False, configure_logging=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise UserError(
            f"{flag} {where}: there is no Ray cluster ({_first_line(error)}): start one with `ray start --head`, or "
            "join one with `ray start --address HOST:PORT`, on this machine"
        ) from error
    except (RuntimeError, ValueError) as error:
        ray.shutdown()
        reason = " ".join(str(error).split())[:400]  # Ray's message has several lines
        raise UserError(f"{flag} {where}: Ray refuses ({reason})") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray replaced the run's handler
    try:
        yield
    finally:
        ray.shutdown()


def ray_nodes() -> list[NodeInfo]:
    """Return the nodes that are alive, by address; a name shared by several nodes gets a prefix of the id appended."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = [node["NodeManagerHostname"] for node in alive]
    own = ray.get_runtime_context().get_node_id()
    facts = [
        NodeInfo(
            id=node["NodeID"],
            name=name if names.count(name) == 1 else f"{name}-{node['NodeID'][:6]}",
            address=node["NodeManagerAddress"],
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            is_here=node["NodeID"] == own,
        )
        for node, name in zip(alive, names, strict=True)
    ]
    return sorted(facts, key=_by_address)


class RayCluster:
    """The nodes and slots of a run on the Ray cluster that `--ray-address` names."""

    def __init__(self, config: Config, *, device: str, trainers: int, rollout: int) -> None:
        self._config = config
        self._device = device
        self._stack = contextlib.ExitStack()
        self._remotes: dict[str, RemoteNode] = {}
        self._here: LocalNode | None = None
        self._provided: list[Callable[[RemoteNode], None]] = []
        """The `provide` calls so far, to repeat for a replacement node."""
        self._bundle_of: list[tuple[Slot, int, int]] = []
        """Each slot with its bundle of the group and its index in that bundle."""
        try:
            self._stack.enter_context(ray_connection(config.ray_address))
            self._facts = {node.id: node for node in ray_nodes()}
            self._own_id = ray.get_runtime_context().get_node_id()
            nodes = list(self._facts.values())
            self._bundles = make_bundles(config, device, nodes, trainers=trainers, rollout=rollout)
            fit(self._bundles, nodes, device)
            self._group = self._make_group()
            self._digest = package_digest(PACKAGE)
            self._token = secrets.token_hex(32)
            self._listener = Listener(self._facts[self._own_id].address, self._token)
            self._stack.callback(self._listener.close)
            where = placement_group_table(self._group)["bundles_to_node_id"]
            placed = [(bundle, number, self._facts[where[number]]) for number, bundle in enumerate(self._bundles)]
            # Trainers first, each role sorted by node.
            places = sorted(placed, key=lambda place: (place[0].role != TRAINER, _by_address(place[2]), place[1]))
            self._reach(places)
            self.placement = self._make_placement(places, rollout)
        except BaseException:
            self._stack.close()
            raise

    # the interface

    def provide(self, paths: Sequence[str]) -> None:
        self._provide_to_all(copy_to_node, paths)

    def provide_code(self, folders: Sequence[str]) -> None:
        self._provide_to_all(copy_code_to_node, folders)

    def _provide_to_all(self, way: Callable[..., str], paths: Sequence[str]) -> None:
        act = partial(self._provide, way, sorted({os.path.abspath(path) for path in paths}))
        self._provided.append(act)
        remotes = [node for node in self._remotes.values() if not node.is_lost]
        if remotes:
            with ThreadPoolExecutor(len(remotes)) as pool:
                list(pool.map(act, remotes))

    def nodes_without(self, folder: str, nodes: Sequence[Node] | None = None) -> list[str]:
        asked = self.placement.nodes if nodes is None else nodes
        remotes = [node for node in asked if isinstance(node, RemoteNode) and not node.is_lost]
        if not remotes:
            return []
        Path(folder).mkdir(parents=True, exist_ok=True)
        text = secrets.token_hex(16)
        marker = Path(os.path.abspath(folder)) / f".slime-shared-{text[:8]}"
        marker.write_text(text)
        try:
            return [node.name for node in remotes if not self._ask(node, "sees", str(marker), text)]
        finally:
            marker.unlink()

    def spare(self, like: Slot) -> Slot | None:
        """Return the slot where Ray has moved the bundle since its node was lost, or None."""
        bundle, place = next((bundle, place) for slot, bundle, place in self._bundle_of if slot is like)
        if not self._group.wait(SPARE_WAIT_S):
            return None
        self._facts = {node.id: node for node in ray_nodes()}
        where = placement_group_table(self._group)["bundles_to_node_id"][bundle]
        if where not in self._facts or self._facts[where].name == like.node.name:
            return None
        is_new = where != self._own_id and where not in self._remotes
        node = self._start_agent(self._facts[where])
        if is_new:
            for provide in self._provided:
                provide(self._remotes[where])
        slot = Slot(node, self._devices([bundle])[bundle][place])
        self._bundle_of = [(slot if old is like else old, b, p) for old, b, p in self._bundle_of]
        return slot

    def close(self) -> None:
        self._stack.close()

    # placing

    def _make_group(self) -> PlacementGroup:
        resource = "GPU" if self._device == "cuda" else "CPU"
        group = placement_group([{resource: float(bundle.count)} for bundle in self._bundles], strategy="PACK")
        self._stack.callback(remove_placement_group, group)
        if not group.wait(1.0):
            wanted = sum(bundle.count for bundle in self._bundles)
            free = int(ray.available_resources().get(resource, 0))
            logger.warning("waiting for other jobs of the Ray cluster: %d %ss wanted, %d free", wanted, resource, free)
            with waiting(
                "the Ray cluster", f"to have {wanted} {resource}s free", timeout_s=PLACEMENT_TIMEOUT_S
            ) as wait:
                while not group.wait(1.0):
                    if wait.is_over():
                        raise expired(wait, WaitTimeout, f"{wait.sentence()}: other jobs have them")
        return group

    def _make_placement(self, places: Sequence[tuple[Bundle, int, NodeInfo]], rollout: int) -> SlotPlacement:
        slots: dict[str, list[Slot]] = {TRAINER: [], ENGINE: []}
        devices = self._devices([number for _, number, _ in places])
        for bundle, number, facts in places:
            own = [Slot(self._node(facts), device) for device in devices[number]]
            self._bundle_of += [(slot, number, place) for place, slot in enumerate(own)]
            slots[bundle.role].extend(own)
        shared = slots[TRAINER] if self._config.colocate else []
        return SlotPlacement(tuple(slots[TRAINER]), tuple([*shared, *slots[ENGINE]][:rollout]))

    def _devices(self, numbers: Sequence[int]) -> dict[int, Sequence[str | None]]:
        """Return the GPUs of bundles by their names in CUDA_VISIBLE_DEVICES; an actor in each bundle reports them."""
        if self._device != "cuda":
            return {number: [None] * self._bundles[number].count for number in numbers}
        holders = {}
        for number in numbers:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            options = {"num_cpus": 0, "num_gpus": self._bundles[number].count, "scheduling_strategy": strategy}
            holders[number] = ray.remote(device_holder()).options(**options).remote()
        try:
            reported: list[list[str]] = ray.get([holder.ids.remote() for holder in holders.values()], timeout=ANSWER_S)
        except (GetTimeoutError, RayError) as error:
            raise RunFailed(f"cannot read from Ray which GPUs it assigned: {_first_line(error)}") from error
        finally:
            for holder in holders.values():
                ray.kill(holder)
        ordered = [sorted(ids, key=lambda one: (len(one), one)) for ids in reported]
        return dict(zip(holders, ordered, strict=True))

    # nodes

    def _node(self, facts: NodeInfo) -> Node:
        if facts.id == self._own_id:
            assert self._here is not None
            return self._here
        return self._remotes[facts.id]

    def _reach(self, places: Sequence[tuple[Bundle, int, NodeInfo]]) -> None:
        """Start an agent on every node except the driver's, which listens on an address that the others reach."""
        used = list({facts.id: facts for _, _, facts in places}.values())
        others = [facts for facts in used if facts.id != self._own_id]
        own = self._facts[self._own_id].address
        given = self._config.host
        self._here = LocalNode(own if others and is_loopback(given) else given, alone=not others)
        if others:
            with ThreadPoolExecutor(len(others)) as pool:
                list(pool.map(self._start_agent, others))

    def _start_agent(self, facts: NodeInfo) -> Node:
        if facts.id == self._own_id or facts.id in self._remotes:
            return self._node(facts)
        strategy = NodeAffinitySchedulingStrategy(facts.id, soft=False)
        options = {"num_cpus": 0, "max_concurrency": AGENT_THREADS, "scheduling_strategy": strategy}
        actor = ray.remote(agent_class()).options(**options).remote()
        self._stack.callback(partial(ray.kill, actor))
        surveyed = _first_answer(facts, actor.survey.remote(PACKAGE.name, REQUIRED_PACKAGES))
        if surveyed["missing"]:
            raise UserError(
                f"the node {facts.name} ({facts.address}) has no {', '.join(surveyed['missing'])} in the Python that "
                f"Ray uses there ({surveyed['python']}): install slime's dependencies there, as here"
            )
        parent = surveyed["parent"]
        if surveyed["digest"] != self._digest:
            logger.info("%s has no slime or a different one: sending this one", facts.name)
            parent = _first_answer(facts, actor.unpack.remote(_zipped(PACKAGE), self._digest, PACKAGE.name))
        _first_answer(facts, actor.begin.remote(parent, os.getcwd()))
        agent = partial(_call_agent, f"{facts.name} ({facts.address})", actor)
        node = RemoteNode(facts.name, facts.address, surveyed["cores"], agent, self._listener, self._token)
        node.sockets = self._ask(node, "sockets_at", facts.address)
        self._remotes[facts.id] = node
        self._stack.callback(node.close)
        return node

    def _ask(self, node: RemoteNode, method: str, *args: object) -> Any:
        try:
            return node.call(method, *args, timeout_s=ANSWER_S)
        except NodeLost as error:
            raise RunFailed(str(error)) from error

    def _provide(self, way: Callable[..., str], paths: Sequence[str], node: RemoteNode) -> None:
        for path in paths:
            try:
                there = way(Path(path), partial(node.call, timeout_s=COPY_TIMEOUT_S))
            except UserError as error:
                raise UserError(f"the node {node.name} cannot get {path}: {error}") from error
            except NodeLost as error:
                raise RunFailed(f"the node {node.name} was lost while {path} was sent there: {error}") from error
            if there != path:
                logger.info("%s has %s as %s", node.name, path, there)
                node.paths[path] = there


def _call_agent(name: str, actor: ActorHandle, method: str, *args: object, timeout_s: float = 60.0) -> Any:
    """Call the agent of one node, which is a Ray actor."""
    try:
        kind, value = ray.get(actor.call.remote(method, *args), timeout=timeout_s)
    except GetTimeoutError as error:
        raise NodeTimeout(f"the node {name} did not answer {method} in {timeout_s:g} s") from error
    except RayError as error:
        raise NodeLost(f"the node {name} cannot be reached: {_first_line(error)}") from error
    if kind == OK:
        return value
    raise UserError(value) if kind == USER_ERROR else RunFailed(f"{method} on the node {name} failed: {value}")


def device_holder() -> type:
    """Return an actor class that reports the GPUs of its bundle; it is local so that Ray pickles it by value."""

    class DeviceHolder:
        def ids(self) -> list[str]:
            import ray

            return [str(one) for one in ray.get_gpu_ids()]

    return DeviceHolder


def _first_answer(facts: NodeInfo, answer: object) -> Any:
    """Wait for the answer of a node that may not be up."""
    try:
        return ray.get(answer, timeout=ANSWER_S)
    except (GetTimeoutError, RayError) as error:
        raise RunFailed(f"the node {facts.name} ({facts.address}) does not answer: {_first_line(error)}") from error


def _by_address(facts: NodeInfo) -> tuple[int, int | str, str]:
    try:
        address = ip_address(facts.address)
        return (address.version, int(address), facts.id)
    except ValueError:
        return (9, facts.address, facts.id)


def _check_reachable(where: str, flag: str) -> None:
    """Raise a `UserError` for an address that cannot be reached; Ray would try for a minute and print thirty lines."""
    if where == "auto":
        return
    if "://" in where:
        raise UserError(
            f"{flag} {where}: give HOST:PORT of the cluster's head as `ray start` prints it, and run on a node of the "
            "cluster; for an http:// address use `ray job submit --address ... -- python train.py ...`"
        )
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"{flag} {where}: give HOST:PORT, or auto for the cluster that this machine is part of")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except OSError as error:
        raise UserError(
            f"{flag} {where}: no server answers there ({error}): start the cluster with `ray start --head`, or correct "
            "the address"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _zipped(package: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(package.parent))
    return buffer.getvalue()
