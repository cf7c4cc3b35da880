"""Tests that checkpoints stay bitwise equal when they are loaded and saved in other trainer layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.config import Config
from slime.train.checkpoints.reader import SavedTensors
from slime.train.topology import Ranks
from slime.train.trainer import Trainer
from tests.peers import together
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]
State = dict[str, dict[str, torch.Tensor]]
KINDS = ("model", "optim", "ref", "critic/model", "critic/optim")


def resume_and_save(ranks: Ranks, values: dict[str, Any]) -> torch.Tensor:
    """Load a checkpoint on these ranks and save it again; return the restored random state of this rank."""
    trainer = Trainer(Config.from_dict(values), "cpu")
    assert trainer.init(ranks)["begin"] == 2
    found = torch.get_rng_state()
    trainer.save(1)
    return found


def state_of(folder: Path, number: int = 1) -> State:
    name = f"iter_{number:07d}"
    places = {kind: folder / Path(kind).parent / name for kind in KINDS}
    return {kind: dict(SavedTensors(place, Path(kind).name)) for kind, place in places.items()}


def assert_same(one: State, other: State) -> None:
    for kind in KINDS:
        assert one[kind].keys() == other[kind].keys()
        assert one[kind], kind
        for name, tensor in one[kind].items():
            assert tensor.dtype == other[kind][name].dtype
            assert torch.equal(tensor, other[kind][name]), f"{kind} {name}"


@pytest.fixture(scope="module")
def saved(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """A policy, an updated reference and a critic after two rollouts, saved by one process."""
    folder = tmp_path_factory.mktemp("resharding")
    flags = {"advantage_estimator": "ppo", "use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1}
    config = config_for(model_folder("qwen3_moe"), folder, **flags, save=str(folder / "1"))
    run = InProcess(config)
    for rollout_id in range(2):
        run.train(rollout_id, make_samples(3, 3, seed=rollout_id))
    run.trainer.save(1)
    return config, folder / "1"


HOPS: dict[str, tuple[int, dict[str, Any]]] = {
    "two ranks": (2, {}),
    "two copies on two ranks each": (4, {"fsdp_shard_size": 2}),
    "four ranks that share sequences by twos": (4, {"context_parallel_size": 2}),
    "one rank": (1, {}),
}


def test_checkpoint_state_survives_layout_changes(saved: tuple[Config, Path], tmp_path: Path) -> None:
    config, source = saved
    expected = state_of(source)
    for index, (what, (count, layout)) in enumerate(HOPS.items()):
        target = tmp_path / str(index)
        changes = {"load": str(source), "critic_load": str(source / "critic"), "save": str(target), **layout}
        values = config.replace(**changes, critic_save=str(target / "critic"), actor_num_gpus_per_node=count).to_dict()
        states = together(count, resume_and_save, values, folder=tmp_path)
        assert_same(state_of(target), expected)
        before = load_file(source / "iter_0000001" / "rng.safetensors")
        for rank in range(min(count, len(before))):
            assert torch.equal(states[rank], before[f"cpu.{rank}"]), what
        meta = json.loads((target / "iter_0000001" / "meta.json").read_text())
        assert (meta["format"], meta["world_size"]) == (2, count)
        writers = {name.split("-")[1] for name in meta["files"]}
        assert writers == {f"r{rank:05d}" for rank in range(count)}, what
        source = target


def test_resumes_from_format_1_checkpoint(saved: tuple[Config, Path], tmp_path: Path) -> None:
    config, source = saved
    expected = state_of(source)
    for role in ("", "critic"):
        old = tmp_path / "old" / role / "iter_0000001"
        old.mkdir(parents=True)
        new = source / role / "iter_0000001"
        for kind in ("model", "optim", "ref"):
            tensors = dict(SavedTensors(new, kind))
            if tensors:
                save_file(tensors, old / f"{kind}-00001.safetensors", metadata={"format": "pt"})
        (old / "rng.safetensors").write_bytes((new / "rng.safetensors").read_bytes())
        meta = json.loads((new / "meta.json").read_text())
        del meta["files"]
        (old / "meta.json").write_text(json.dumps(meta | {"format": 1}))
        (old.parent / "latest_checkpointed_iteration.txt").write_text("1\n")
    folders = {"load": str(tmp_path / "old"), "critic_load": str(tmp_path / "old" / "critic")}
    run = InProcess(config.replace(**folders, save=str(tmp_path / "new"), critic_save=str(tmp_path / "new" / "critic")))
    assert run.start == 2
    run.trainer.save(1)
    assert_same(state_of(tmp_path / "new"), expected)
