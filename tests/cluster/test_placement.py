"""Bundles of processes that need one node, and the error if no node has enough resources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slime.cluster.remote.placement import ENGINE, TRAINER, Bundle, NodeInfo, fit, make_bundles
from slime.config import Config
from slime.driver.plan.schedule import plan_nodes
from slime.errors import UserError


def node(name: str, gpus: int, cpus: int = 8) -> NodeInfo:
    return NodeInfo(f"id-{name}", name, f"10.0.0.{ord(name[0]) - 96}", cpus, gpus)


def config_of(**flags: Any) -> Config:
    return Config(hf_checkpoint="model", **{"actor_num_gpus_per_node": 4, **flags})


def bundles(config: Config, nodes: list[NodeInfo], *, trainers: int, rollout: int) -> list[tuple[str, int]]:
    made = make_bundles(config, "cuda", nodes, trainers=trainers, rollout=rollout)
    return [(bundle.role, bundle.count) for bundle in made]


@pytest.mark.parametrize(
    ("flags", "trainers", "rollout", "made"),
    [
        ({"actor_num_nodes": 2}, 8, 2, [(TRAINER, 4), (TRAINER, 4), (ENGINE, 1), (ENGINE, 1)]),
        ({"rollout_num_gpus_per_engine": 2}, 4, 4, [(TRAINER, 4), (ENGINE, 2), (ENGINE, 2)]),
        ({"rollout_num_gpus_per_engine": 16}, 0, 16, [(ENGINE, 8), (ENGINE, 8)]),
        ({"colocate": True, "actor_num_nodes": 2}, 8, 8, [(TRAINER, 4), (TRAINER, 4)]),
        ({"colocate": True}, 4, 6, [(TRAINER, 4), (ENGINE, 1), (ENGINE, 1)]),
        ({}, 4, 0, [(TRAINER, 4)]),
    ],
)
def test_bundles_group_processes_that_need_one_node(
    flags: dict[str, Any], trainers: int, rollout: int, made: list[tuple[str, int]]
) -> None:
    assert bundles(config_of(**flags), [node("a", 8), node("b", 4)], trainers=trainers, rollout=rollout) == made


def test_large_bundles_are_placed_first_and_nodes_filled_up() -> None:
    nodes = [node("a", 4), node("b", 8), node("c", 2)]
    placed = fit([Bundle(ENGINE, 2), Bundle(TRAINER, 8), Bundle(TRAINER, 4), Bundle(ENGINE, 0)], nodes, "cuda")
    assert [one.name for one in placed[:3]] == ["c", "b", "a"]


def test_placement_error_lists_the_resources_of_every_node() -> None:
    nodes = [node("a", 4), node("b", 2)]
    config = config_of(actor_num_nodes=2)
    with pytest.raises(UserError) as refused:
        fit(make_bundles(config, "cuda", nodes, trainers=8, rollout=1), nodes, "cuda")
    assert str(refused.value) == (
        "a training node needs 4 GPUs on one node, but no node of the Ray cluster has enough left: a has 4 GPUs (4 for "
        "trainers); b has 2 GPUs: lower --actor-num-nodes or --actor-num-gpus-per-node, or add nodes"
    )
    with pytest.raises(UserError, match=r"an engine needs 1 CPU on one node.*a has 0 CPUs: lower --rollout-num-gpus"):
        fit([Bundle(ENGINE, 1)], [node("a", 4, cpus=0)], "cpu")


def test_plan_has_a_row_for_each_node() -> None:
    nodes = [replace(node("a", 4), is_here=True), node("b", 8)]
    planned = plan_nodes(config_of(), "cuda", nodes, trainers=4, rollout=2)
    assert planned.rows == (
        ("node a", "4 GPUs for trainers (has 4, at 10.0.0.1)"),
        ("node b", "2 GPUs for engines (has 8, at 10.0.0.2)"),
    )
    assert planned.elsewhere == ("b",)
    shared = plan_nodes(config_of(colocate=True), "cuda", nodes, trainers=4, rollout=4)
    assert shared.rows == (("node a", "4 GPUs for trainers and engines (has 4, at 10.0.0.1)"),)
    assert shared.elsewhere == ()
