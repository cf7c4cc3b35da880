"""Checkpoints saved in one Megatron layout are restored bit for bit in other layouts and in FSDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.driver.convert import Conversion
from slime.errors import UserError
from slime.models.safetensors_io import open_weights
from slime.train.checkpoints.reader import SavedTensors
from slime.train.topology import Ranks
from slime.train.trainer import Trainer
from tests.megatron.ranks import RankGroup
from tests.megatron.trainings import COMMON, train_rollout
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import make_samples

Folder = Callable[[str], Path]
Metrics = list[dict[str, float]]

TP, PP, EP = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
)
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
FOLLOWED = {**KL, "ref_update_interval": 1, "ref_update_decay": 0.5}
COPIED = {"use_distributed_optimizer": False}
HALF = {"dtype": "bfloat16"}
TRIPS: dict[str, tuple[str, dict[str, Any], tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "tp2 to pp2": ("qwen3", FOLLOWED, (2, TP), (2, PP)),
    "dp2 to tp2 pp2": ("qwen3", {}, (2, {}), (4, {**TP, **PP})),
    "tp2 pp2 to dp2, copies": ("llama", {}, (4, {**TP, **PP}), (2, COPIED)),
    "ep2 to tp2": ("qwen3_moe", {}, (2, EP), (2, TP)),
    "half dp2 to pp2": ("qwen3", HALF, (2, {}), (2, PP)),
    "half dp2 dp2, copies": ("qwen3", HALF, (2, {}), (2, COPIED)),
    "stacked experts": ("gpt_oss", {}, (2, EP), (2, PP)),
    "ppo": ("qwen3", {"advantage_estimator": "ppo"}, (2, TP), (2, PP)),
}


def train_and_save(
    folder: Path, out: Path, saved: Path, flags: dict[str, Any], load: Path | None, count: int
) -> Metrics:
    """Train `count` rollouts from checkpoint `load` and save to `saved`; every process of the group calls it."""
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


def weights_at_start(folder: Path, out: Path, flags: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Full initial weights of the policy and of its reference."""
    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD, torch.device("cpu"))
    changes = {**COMMON, "train_backend": "megatron", "actor_num_gpus_per_node": ranks.size, **KL, **flags}
    try:
        trainer = Trainer(config_for(folder, out, **changes), "cpu")
        trainer.init(ranks)
        backend = trainer.actor.backend
        return {name: dict(backend.full_parameters(name)) for name in ("policy", "ref")}
    finally:
        parallel_state.destroy_model_parallel()


def assert_same_state(one: Path, other: Path, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        before, after = SavedTensors(one, kind), SavedTensors(other, kind)
        assert before.names == after.names
        assert before.names
        for name in before.names:
            assert torch.equal(before[name], after[name]), (kind, name)
            assert before[name].dtype == after[name].dtype


@pytest.mark.parametrize("trip", TRIPS)
def test_checkpoint_is_restored_bit_for_bit_in_another_layout(
    trip: str, model_folder: Folder, ranks: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    kind, flags, (size, layout), (other_size, other_layout) = TRIPS[trip]
    model, first, second = model_folder(kind), tmp_path / "first", tmp_path / "second"
    ranks(size).run(train_and_save, model, tmp_path / "a", first, {**flags, **layout}, None, 2)
    ranks(other_size).run(train_and_save, model, tmp_path / "b", second, {**flags, **other_layout}, first, 0)
    kinds = ("model", "optim", "ref") if flags is FOLLOWED else ("model", "optim")
    assert_same_state(first / "iter_0000001", second / "iter_0000001", kinds)
    if trip == "ppo":
        assert_same_state(first / "critic" / "iter_0000001", second / "critic" / "iter_0000001", kinds)
    before, after = open_weights(tmp_path / "a" / "hf"), open_weights(tmp_path / "b" / "hf")
    assert before.names == after.names == open_weights(model).names
    assert all(torch.equal(before[name], after[name]) for name in before.names)
    assert any(not torch.equal(before[name], tensor.to(before[name].dtype)) for name, tensor in open_weights(model))


def test_fsdp_resumes_from_megatron_and_megatron_from_fsdp(
    model_folder: Folder, ranks: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    model, saved = model_folder("qwen3"), tmp_path / "saved"
    ranks(2).run(train_and_save, model, tmp_path / "a", saved, TP, None, 2)
    by_fsdp = InProcess(config_for(model, tmp_path, **COMMON, load=str(saved), save=str(tmp_path / "fsdp")))
    assert by_fsdp.start == 2
    by_fsdp.trainer.save(1)
    assert_same_state(saved / "iter_0000001", tmp_path / "fsdp" / "iter_0000001", ("model", "optim"))
    (metrics, *_) = ranks(2).run(train_and_save, model, tmp_path / "b", tmp_path / "again", PP, tmp_path / "fsdp", 1)
    expected = by_fsdp.train(2, make_samples(3, 3, seed=2))["metrics"][0]
    assert metrics[0]["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
    assert metrics[0]["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_weights_load_from_checkpoint_hf_folder_and_torch_dist(
    kind: str, model_folder: Folder, ranks: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    """Sources: a trainer checkpoint, the folder `slime convert` makes of it, and a torch_dist checkpoint of that."""
    model, saved, flags = model_folder(kind), tmp_path / "saved", EP if kind == "qwen3_moe" else TP
    ranks(2).run(train_and_save, model, tmp_path / "a", saved, flags, None, 1)
    folder = Conversion(saved, tmp_path / "hf", "float32").run()
    release = Conversion(folder, tmp_path / "release", "float32", format="torch_dist").run()
    expected = dict(SavedTensors(saved / "iter_0000000", "model"))
    assert all(torch.equal(expected[name], tensor) for name, tensor in open_weights(folder))
    for source in (saved, folder, release):
        for found in ranks(2).run(weights_at_start, model, tmp_path / "b", {**PP, "ref_load": str(source)}):
            for weights in found.values():
                assert weights.keys() == expected.keys()
                assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items()), source


def test_fsdp_rejects_a_megatron_checkpoint_with_experts(
    model_folder: Folder, ranks: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    model, saved = model_folder("qwen3_moe"), tmp_path / "saved"
    ranks(2).run(train_and_save, model, tmp_path / "a", saved, EP, None, 1)
    with pytest.raises(UserError, match="was saved by the other --train-backend"):
        InProcess(config_for(model, tmp_path, **COMMON, load=str(saved)))
