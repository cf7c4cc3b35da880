"""Placement on a real Ray cluster: assigned nodes and GPUs, processes on them, and rejected requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from slime.cluster.factory import find_machines, open_cluster
from slime.cluster.node import OWN_PYTHON, ProcessCommand
from slime.cluster.ray import RayCluster
from slime.cluster.remote.node import RemoteNode
from slime.config import Config
from slime.errors import UserError
from tests.ray.conftest import STORE_BYTES


def config_of(cluster: Cluster, **flags: Any) -> Config:
    return Config(
        hf_checkpoint="model",
        ray_address=cluster.address,
        **{"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, **flags},
    )


@contextmanager
def opened(config: Config, device: str = "cpu", *, trainers: int = 2, rollout: int = 2) -> Iterator[RayCluster]:
    cluster = open_cluster(config, device, trainers=trainers, rollout=rollout)
    assert isinstance(cluster, RayCluster)
    try:
        yield cluster
    finally:
        cluster.close()


def python(name: str, code: str, **fields: Any) -> ProcessCommand:
    return ProcessCommand(name, (OWN_PYTHON, "-c", code), **fields)


def test_trainers_share_a_node_and_engines_have_their_own(cluster: Cluster, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with opened(config_of(cluster)) as placed:
        placement = placed.placement
        assert [slot.device for slot in (*placement.trainers, *placement.rollout)] == [None] * 4
        assert placement.trainers[0].node is placement.trainers[1].node
        assert len({id(node) for node in placement.nodes}) == 3
        assert not any(node.is_here for node in placement.nodes)
        assert placed.nodes_without(str(tmp_path / "run")) == []
        assert list((tmp_path / "run").iterdir()) == []

        node = placement.trainers[0].node
        code = "import os, slime; print(os.getcwd(), slime.__file__, os.environ.get('OMP_NUM_THREADS'), 'TOKEN' in os.environ)"
        process = node.start(python("told", code), tmp_path / "told.log")
        assert process.wait(240) == 0, process.tail()
        import slime

        assert process.tail().split() == [os.getcwd(), str(slime.__file__), os.environ.get("OMP_NUM_THREADS"), "False"]
        assert len(set(node.free_ports(3))) == 3

        assert isinstance(node, RemoteNode)
        sleeper = node.start(python("sleeper", "import time; time.sleep(600)"), tmp_path / "sleeper.log")
        child = psutil.Process(sleeper.pid)
        os.kill(sleeper.pid, signal.SIGKILL)  # the agent survives its child
        assert sleeper.wait(240) == -signal.SIGKILL
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        left = node.start(python("left", "import time; time.sleep(600)"), tmp_path / "left.log")
        guard = psutil.Process(left.pid)
    psutil.wait_procs([guard], timeout=240)
    assert not guard.is_running()  # processes that are not stopped explicitly end with the cluster
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_gpus_are_assigned_by_node_and_device(cluster: Cluster) -> None:
    eight = cluster.add_node(num_cpus=0, num_gpus=8, object_store_memory=STORE_BYTES)
    four = cluster.add_node(num_cpus=0, num_gpus=4, object_store_memory=STORE_BYTES)
    cluster.wait_for_nodes()
    try:
        config = config_of(cluster, actor_num_gpus_per_node=4, rollout_num_gpus=8, rollout_num_gpus_per_engine=4)
        found = find_machines(config)
        assert (found.device, found.gpus, len(found.nodes)) == ("cuda", 12, 6)
        with opened(config, "cuda", trainers=4, rollout=8) as placed:
            placement = placed.placement
            assert len({id(slot.node) for slot in placement.trainers}) == 1
            for engine in (placement.rollout[:4], placement.rollout[4:]):
                assert len({id(slot.node) for slot in engine}) == 1
            taken = [(slot.node.name, slot.device) for slot in (*placement.trainers, *placement.rollout)]
            assert len(set(taken)) == 12
            devices = [int(slot.device or -1) for slot in placement.trainers]
            assert devices == list(range(devices[0], devices[0] + 4))
        with opened(config.replace(colocate=True, actor_num_nodes=2), "cuda", trainers=8, rollout=8) as placed:
            assert placed.placement.rollout == placed.placement.trainers
        with pytest.raises(
            UserError, match=r"a training node needs 16 GPUs on one node.* has [48] GPUs; \S+ has [48] GPUs: "
        ):
            open_cluster(config.replace(actor_num_gpus_per_node=16), "cuda", trainers=16, rollout=0)
    finally:
        cluster.remove_node(eight)
        cluster.remove_node(four)


def test_lost_node_ends_its_processes_and_a_spare_replaces_it(cluster: Cluster, tmp_path: Path) -> None:
    doomed = cluster.add_node(num_cpus=4, object_store_memory=STORE_BYTES)
    cluster.wait_for_nodes()
    removed = False
    try:
        with opened(
            config_of(cluster, rollout_num_gpus=1, rollout_num_gpus_per_engine=4), trainers=0, rollout=4
        ) as placed:
            slot = placed.placement.rollout[0]
            process = slot.node.start(python("engine", "import time; time.sleep(600)"), tmp_path / "engine.log")
            assert placed.spare(slot) is None  # its bundle has not moved
            cluster.remove_node(doomed, allow_graceful=False)
            removed = True
            assert process.wait(240) == -signal.SIGKILL
            assert slot.node.is_lost
            assert process.tail().startswith(f"its node ({slot.node.name}) is gone: ")
            assert placed.spare(slot) is None  # no other node has four CPUs
            fresh = cluster.add_node(num_cpus=4, object_store_memory=STORE_BYTES)
            try:
                cluster.wait_for_nodes()
                found = None
                while found is None:  # Ray moves the bundle when it sees the new node
                    found = placed.spare(slot)
                assert found.node is not slot.node
                again = found.node.start(python("engine", "print('back')"), tmp_path / "again.log")
                assert (again.wait(240), again.tail()) == (0, "back")
            finally:
                cluster.remove_node(fresh)
    finally:
        if not removed:
            cluster.remove_node(doomed)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (
            "127.0.0.1:1",
            r"--ray-address 127.0.0.1:1: no server answers there \(.*\): start the cluster with `ray start",
        ),
        ("ray://127.0.0.1:10001", r"--ray-address ray://127.0.0.1:10001: give HOST:PORT of the cluster's head"),
        ("nowhere", r"--ray-address nowhere: give HOST:PORT, or auto"),
    ],
)
def test_unreachable_or_invalid_ray_address_is_one_error_line(address: str, sentence: str) -> None:
    config = Config(hf_checkpoint="model", ray_address=address)
    with pytest.raises(UserError, match=sentence) as refused:
        find_machines(config)
    assert "\n" not in str(refused.value)


def test_rejects_more_devices_than_the_cluster_has(cluster: Cluster) -> None:
    config = config_of(cluster, actor_num_gpus_per_node=3)
    with pytest.raises(UserError, match=r"a training node needs 3 CPUs on one node.* has 2 CPUs\b.*or add nodes"):
        open_cluster(config, "cpu", trainers=3, rollout=1)
    with pytest.raises(UserError, match=r"--device cuda, but no node of the Ray cluster \(.*\) has a GPU"):
        find_machines(config.replace(device="cuda"))
    assert not ray.is_initialized()


def test_rejects_another_ray_version(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(ray, "__version__", "2.9.0")
        with pytest.raises(UserError, match=r"Ray refuses \(Version mismatch: .*Ray: 2\.9\.0") as refused:
            find_machines(config_of(cluster))
    assert "\n" not in str(refused.value)
    assert not ray.is_initialized()
    assert find_machines(config_of(cluster)).device == "cpu"
