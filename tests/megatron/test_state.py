"""What Megatron's layouts save, every other layout and FSDP continue from, bit for bit; and what leaves for engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.models.weight_reader import weights_of
from slime.train.checkpoints.saved_tensors import SavedTensors
from slime.train.topology import Ranks
from slime.train.trainer import Trainer
from tests.megatron.ranks import RankGroup
from tests.megatron.trainings import COMMON, train_rollout
from tests.train.in_process import config_for

Folder = Callable[[str], Path]
Metrics = list[dict[str, float]]

TP, PP, EP = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
)
FOLLOWED = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1, "ref_update_decay": 0.5}
COPIED = {"use_distributed_optimizer": False}
HALF = {"dtype": "bfloat16"}
TRIPS: dict[str, tuple[str, dict[str, Any], tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "tp2 to pp2": ("qwen3", FOLLOWED, (2, TP), (2, PP)),
    "dp2 to tp2 pp2": ("qwen3", {}, (2, {}), (4, {**TP, **PP})),
    "tp2 pp2 to dp2, copies": ("llama", {}, (4, {**TP, **PP}), (2, COPIED)),
    "ep2 to tp2": ("qwen3_moe", {}, (2, EP), (2, TP)),
    "half dp2 to pp2": ("qwen3", HALF, (2, {}), (2, PP)),
    "half dp2 dp2, copies": ("qwen3", HALF, (2, {}), (2, COPIED)),
    "ppo": ("qwen3", {"advantage_estimator": "ppo"}, (2, TP), (2, PP)),
}


def train_and_save(
    folder: Path, out: Path, saved: Path, flags: dict[str, Any], load: Path | None, count: int
) -> Metrics:
    """So many rollouts from where `load` ends; all processes of a group together. A checkpoint is at `saved`."""
    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD, torch.device("cpu"))
    paths = {"save": str(saved), "load": None if load is None else str(load)}
    changes = {**COMMON, "train_backend": "megatron", "actor_num_gpus_per_node": ranks.size, **flags, **paths}
    config = config_for(folder, out, **changes)
    try:
        trainer = Trainer(config, "cpu")
        begin = trainer.init(ranks)["begin"]
        metrics = [one for number in range(count) for one in train_rollout(trainer, config, begin + number)]
        trainer.save(begin + count - 1)
        trainer.save_hf(str(out / "hf"))
        return metrics
    finally:
        parallel_state.destroy_model_parallel()


def same_state(one: Path, other: Path, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        before, after = SavedTensors(one, kind), SavedTensors(other, kind)
        assert before.names == after.names
        assert before.names
        for name in before.names:
            assert torch.equal(before[name], after[name]), (kind, name)
            assert before[name].dtype == after[name].dtype


@pytest.mark.parametrize("trip", TRIPS)
def test_what_one_layout_saves_another_has_bit_for_bit(
    trip: str, model_folder: Folder, ranks: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    kind, flags, (size, layout), (other_size, other_layout) = TRIPS[trip]
    model, first, second = model_folder(kind), tmp_path / "first", tmp_path / "second"
    ranks(size).run(train_and_save, model, tmp_path / "a", first, {**flags, **layout}, None, 2)
    ranks(other_size).run(train_and_save, model, tmp_path / "b", second, {**flags, **other_layout}, first, 0)
    kinds = ("model", "optim", "ref") if flags is FOLLOWED else ("model", "optim")
    same_state(first / "iter_0000001", second / "iter_0000001", kinds)
    if trip == "ppo":
        same_state(first / "critic" / "iter_0000001", second / "critic" / "iter_0000001", kinds)
    before, after = weights_of(tmp_path / "a" / "hf"), weights_of(tmp_path / "b" / "hf")
    assert before.names == after.names == weights_of(model).names
    assert all(torch.equal(before[name], after[name]) for name in before.names)
    assert any(not torch.equal(before[name], tensor.to(before[name].dtype)) for name, tensor in weights_of(model))
