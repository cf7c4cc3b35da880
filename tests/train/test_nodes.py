"""Tests trainers on remote nodes: environment, paths, rendezvous and node loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.local import LocalCluster, LocalNode
from slime.cluster.node import Slot, SlotPlacement
from slime.cluster.rpc.connect import Listener
from slime.config import Config, derive
from slime.train.node_paths import config_for_node, files_to_provide
from slime.train.processes import RankProcesses, TrainerDied
from slime.train.trainer_group import TrainerGroup
from tests.other_node import OtherNode, listening
from tests.train.tiny_training import make_samples, weight_checksums

Folder = Callable[[str], Path]


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as one:
        yield one


def config(model: str, **changes: Any) -> Config:
    values = {
        "hf_checkpoint": model, "rollout_batch_size": 3, "n_samples_per_prompt": 3, "global_batch_size": 9,
        "num_steps_per_rollout": 1, "num_rollout": 3, "lr": 1e-3, "micro_batch_size": 2, "dtype": "float32",
        "distributed_timeout_minutes": 2, "actor_num_nodes": 2, "actor_num_gpus_per_node": 1,
    }  # fmt: skip
    return derive(Config(**(values | changes)))


def ranks_on(slots: tuple[Slot, ...], device: str = "cpu", rollout: tuple[Slot, ...] = (), **changes: Any) -> Any:
    return RankProcesses(
        config("model", **changes), device=device, run_dir=Path(), placement=SlotPlacement(slots, rollout)
    )


def test_ranks_of_a_node_share_cores_and_visible_devices(listener: Listener) -> None:
    first, second = OtherNode("first", listener), OtherNode("second", listener)
    first.cores, second.cores = 12, 3
    slots = tuple(Slot(node, device) for node, device in zip([first] * 3 + [second] * 2, "42573", strict=True))
    on_cpu = [ranks_on(slots).environment(rank) for rank in range(5)]
    assert [env["OMP_NUM_THREADS"] for env in on_cpu] == ["4", "4", "4", "1", "1"]
    assert [env["RANK"] for env in on_cpu] == ["0", "1", "2", "3", "4"]
    assert [env["LOCAL_RANK"] for env in on_cpu] == ["0", "1", "2", "0", "1"]
    assert [env["LOCAL_WORLD_SIZE"] for env in on_cpu] == ["3", "3", "3", "2", "2"]
    assert {env["WORLD_SIZE"] for env in on_cpu} == {"5"}
    on_gpus = [ranks_on(slots, "cuda").environment(rank) for rank in range(5)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in on_gpus] == ["4,2,5"] * 3 + ["7,3"] * 2
    chosen = ranks_on(slots, "cuda", train_env_vars={"CUDA_VISIBLE_DEVICES": "9"}).environment(0)
    assert chosen["CUDA_VISIBLE_DEVICES"] == "9"


def test_loopback_is_used_only_for_single_machine_runs(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    here, there = Slot(LocalNode("192.0.2.7")), Slot(OtherNode("there", listener))
    assert ranks_on((here,), rollout=(here,)).environment(0)["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    for trainers, rollout in (((here,), (there,)), ((there,), (here,)), ((here, there), ())):
        assert "GLOO_SOCKET_IFNAME" not in ranks_on(trainers, rollout=rollout).environment(0)


def test_default_placement_uses_first_local_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3")
    both = config("model", rollout_num_gpus=4)  # engines that are not started need no devices
    processes = RankProcesses(both, device="cuda", run_dir=Path())
    assert [slot.device for slot in processes.slots] == ["6", "3"]
    assert processes.placement.is_here
    assert processes.environment(1) | {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "6,3"} == processes.environment(1)


def test_remote_node_config_has_absolute_mapped_paths(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "ckpt", "reference"):
        (tmp_path / name).mkdir()
    flags = config("model", ref_load=str(tmp_path / "reference"), load="ckpt", save="ckpt", save_hf="hf/{rollout_id}")
    node = OtherNode("there", listener, {str(tmp_path / "model"): "/cache/1/model"})
    there = config_for_node(node, flags)
    assert (there.hf_checkpoint, there.ref_load) == ("/cache/1/model", str(tmp_path / "reference"))
    assert there.load == there.save == str(tmp_path / "ckpt")
    assert there.save_hf == str(tmp_path / "hf/{rollout_id}")
    assert config_for_node(LocalCluster(flags, device="cpu").placement.trainers[0].node, flags) is flags
    # files that the run saves are shared, not copied
    assert files_to_provide(flags) == [str(tmp_path / "model"), str(tmp_path / "reference")]


def test_ranks_on_two_nodes_match_two_local_ranks(listener: Listener, model_folder: Folder, tmp_path: Path) -> None:
    """They connect over TCP, rendezvous at a store on rank 0, read the model from their own path, and record the
    driver's path."""
    model = model_folder("qwen3")
    here = config(str(model), save=str(tmp_path / "ckpt"))
    results = []
    called = str(tmp_path / "called-so-by-the-driver")
    nodes = [OtherNode(name, listener, {called: str(model)}) for name in ("first", "second")]
    placement = SlotPlacement(tuple(Slot(node) for node in nodes), ())
    for flags, places in ((here, None), (here.replace(hf_checkpoint=called), placement)):
        with TrainerGroup(flags, device="cpu", run_dir=tmp_path / f"run-{len(results)}", placement=places) as group:
            assert group.start() == 0
            trained = [group.train(rollout_id, make_samples(3, 3, seed=rollout_id)) for rollout_id in range(2)]
            saved = group.save(1)
            results.append(([step for one in trained for step in one.metrics], weight_checksums(group)))
    (local, local_weights), (remote, remote_weights) = results
    assert remote == local
    assert remote_weights == local_weights
    assert json.loads((saved / "meta.json").read_text())["hf_checkpoint"] == called
    assert [process.poll() for node in nodes for process in node.started] == [0, 0]


def test_lost_node_with_open_connection_raises_trainer_died(
    listener: Listener, model_folder: Folder, tmp_path: Path
) -> None:
    nodes = [OtherNode(name, listener) for name in ("first", "second")]
    placement = SlotPlacement(tuple(Slot(node) for node in nodes), ())
    with TrainerGroup(config(str(model_folder("qwen3"))), device="cpu", run_dir=tmp_path, placement=placement) as group:
        group.start()
        nodes[1].lose()
        with pytest.raises(TrainerDied, match=r"^trainer-1 ended during train \(its node second is gone\)"):
            group.train(0, make_samples(3, 3))
    with pytest.raises(TrainerDied, match=r"^trainer-0 cannot be started: its node second is gone"):
        ranks_on(placement.trainers[1:]).launch()
