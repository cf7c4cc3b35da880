"""Selection of the cluster kind, and the number of slots that a run requests."""

from __future__ import annotations

from typing import Any

import pytest

from slime.cluster.factory import cluster_kind, open_cluster
from slime.config import Config
from slime.driver.components import places


def config_of(**flags: Any) -> Config:
    return Config(hf_checkpoint="model", **{"rollout_num_gpus": 2, "actor_num_gpus_per_node": 2, **flags})


@pytest.mark.parametrize(
    ("flags", "variable", "kind"),
    [
        ({}, None, "local"),
        ({"ray_address": "auto"}, None, "ray"),
        ({}, "10.0.0.1:6379", "ray"),
        ({"cluster": "local"}, "10.0.0.1:6379", "local"),
        ({"cluster": "ray"}, None, "ray"),
        ({"actor_num_nodes": 2}, None, "local"),
        ({"actor_num_nodes": 2, "device": "cuda"}, None, "ray"),
        ({"actor_num_nodes": 2, "device": "cuda", "cluster": "local"}, None, "local"),
    ],
)
def test_cluster_kind_follows_flags_and_ray_address(
    flags: dict[str, Any], variable: str | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert cluster_kind(config_of(**flags)) == kind


@pytest.mark.parametrize(("gpus", "kind"), [(0, "local"), (8, "ray")])
def test_several_training_nodes_with_gpus_select_ray(gpus: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("slime.cluster.factory.nvidia_gpu_count", lambda: gpus)
    assert cluster_kind(config_of(actor_num_nodes=2)) == kind
    assert cluster_kind(config_of(actor_num_nodes=2, device="cpu")) == "local"
    assert cluster_kind(config_of()) == "local"


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, {"trainers": 2, "rollout": 2}),
        ({"debug_rollout_only": True}, {"trainers": 0, "rollout": 2}),
        ({"debug_train_only": True}, {"trainers": 2, "rollout": 0}),
        ({"rollout_external_engine_addrs": ["a:1"]}, {"trainers": 2, "rollout": 0}),
        (
            {
                "rollout_external_engine_addrs": ["a:1"],
                "use_opd": True,
                "opd_type": "engine",
                "opd_teacher_load": "teacher",
            },
            {"trainers": 2, "rollout": 1},
        ),
    ],
)
def test_only_processes_that_are_started_get_slots(flags: dict[str, Any], wanted: dict[str, int]) -> None:
    config = config_of(**flags)
    assert places(config) == wanted
    placement = open_cluster(config.replace(cluster="local"), "cpu", **wanted).placement
    assert (len(placement.trainers), len(placement.rollout)) == (wanted["trainers"], wanted["rollout"])
    assert placement.is_here
