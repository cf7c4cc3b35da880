"""A whole run over the nodes of a Ray cluster gives the same numbers as a local run (short quickstart task)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from slime.quickstart.arithmetic import make_model, write_problems
from tests.e2e.runs import TRAIN, assert_same_records, comparable, records, run

PROCESSES = ("--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2")
REWARD = """\
def token_sum(args, sample):
    return sum(sample.tokens) % 7 / 7
"""
"""A reward that varies even for random weights, whose sums are never correct and would train nothing."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the quickstart's model and sums, and a decoy package `slime` that no process may import."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "slime").mkdir()
    (folder / "slime" / "__init__.py").write_text("raise ImportError('this is another slime')\n")
    make_model(folder / "model", seed=1)
    problems = write_problems(folder / "data", held_out=20, seed=1)
    assert problems.training.parent == folder / "data"
    (folder / "rewards.py").write_text(REWARD)
    return folder


def flags(place: Path) -> list[str]:
    training = write_problems(place / "data", held_out=20, seed=1).training
    return [
        *("--hf-checkpoint", "model", "--prompt-data", str(training), "--input-key", "prompt", "--label-key", "label"),
        *("--custom-rm-path", "rewards.token_sum", "--rollout-shuffle", "--device", "cpu"),
        *("--dtype", "float32", "--seed", "1", "--num-rollout", "3", "--rollout-batch-size", "8"),
        *("--n-samples-per-prompt", "4", "--rollout-max-response-len", "8", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", "8192", "--lr", "4e-4", "--progress", "plain"),
        *PROCESSES,
    ]


def test_run_over_three_nodes_matches_a_local_run(cluster: Cluster, place: Path) -> None:
    here = run([*TRAIN, *flags(place), "--save-interval", "3", "--cluster", "local", "--output-dir", "here"], place)
    assert (here.code, here.err) == (0, "")
    there = run(
        [*TRAIN, *flags(place), "--save-interval", "3", "--output-dir", "there"], place, RAY_ADDRESS=cluster.address
    )
    assert there.code == 0, there.err
    assert [record["rollout_id"] for record in records(place / "there", "train")] == [0, 1, 2]
    assert all(record["train/grad_norm"] > 0 for record in records(place / "there", "train"))
    assert_same_records(comparable(place / "there"), comparable(place / "here"), 0.0)
    logs = {path.name: path.read_text() for path in (place / "there" / "logs").iterdir()}
    assert {*logs} == {"driver.log", "engine-0.log", "engine-1.log", "trainer-0.log", "trainer-1.log"}
    assert "error" not in there.err.lower()


def test_dry_run_shows_the_placement_on_nodes(cluster: Cluster, place: Path) -> None:
    planned = run(
        [sys.executable, "-m", "slime.cli", "train", *flags(place), "--dry-run", "--ray-address", cluster.address],
        place,
    )
    assert planned.code == 0, planned.err
    assert planned.out.count("CPUs for trainers") == 1
    assert planned.out.count("1 CPU for engines") == 2
    assert "nccl (trainers and engines are on several nodes" in planned.out
