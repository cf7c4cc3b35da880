"""Whole nodes of a Ray cluster are lost during a run: checks of its journal and of its training data."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.e2e.runs import ENGINE, TRAINER, Running, started, wait_until
from tests.e2e.test_crashes import Storm
from tests.e2e.test_crashes import place as place  # the model, the prompts and the reward of those runs
from tests.ray.conftest import QUIET, STORE_BYTES

PATIENCE_S = 280.0
STEPS_BETWEEN = 2


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of the driver node and five nodes of one core each: for one trainer, two engines and two spares."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLIME_NODE_CACHE", str(tmp_path / "node-cache"))
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(5):
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def test_run_survives_lost_engine_and_trainer_nodes_and_a_killed_driver(nodes: Cluster, place: Path) -> None:
    storm = Storm(place, "sync", rollouts=16, chance=random.Random(1))
    command = [*storm.command(), "--rollout-num-gpus", "2", "--ray-address", nodes.address, "--progress", "plain"]
    with started(command, place) as life:
        kill_node_of(nodes, storm, life, ENGINE)
        kill_node_of(nodes, storm, life, TRAINER)
        await_steps(storm, life, STEPS_BETWEEN)
        os.kill(life.popen.pid, signal.SIGKILL)
        life.popen.wait()
    assert wait_until(lambda: not engine_and_trainer_processes(place), PATIENCE_S), (
        "processes outlive the driver on other nodes"
    )
    storm.check()
    with started(command, place) as life:
        done = life.finish()
    assert done.code == 0, done.err
    storm.check_end()
    log = (storm.run_dir / "logs" / "driver.log").read_text()
    assert "is gone" in log
    assert "restart 1 of 3" in log


def kill_node_of(nodes: Cluster, storm: Storm, life: Running, program: str) -> None:
    """After some more steps, removes the node that runs such a process, with all processes on it."""
    await_steps(storm, life, STEPS_BETWEEN)
    (pid, *_) = [pid for pid, command in engine_and_trainer_processes(storm.folder) if program in command]
    above = list(ancestors(pid))
    node = next(node for node in nodes.worker_nodes if raylet(node) in above)
    nodes.remove_node(node, allow_graceful=False)
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists(), PATIENCE_S), f"{program} outlives its node"


def await_steps(storm: Storm, life: Running, more: int) -> None:
    until = storm._steps() + more
    ended = wait_until(lambda: storm._steps() >= until or life.popen.poll() is not None, PATIENCE_S)
    assert ended, "no step is made any more"
    if life.popen.poll() is not None:
        raise AssertionError(f"the run ended early:\n{life.finish()}")


def engine_and_trainer_processes(folder: Path) -> list[tuple[int, str]]:
    """Returns (pid, command line) of the trainers and engines of the run in this folder, on any node."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if os.readlink(process / "cwd") == str(folder) and "reaper.py" not in command:
                    found.append((int(process.name), command))
            except OSError:
                continue
    return [(pid, command) for pid, command in found if ENGINE in command or TRAINER in command]


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)
