"""A Megatron trainer offloaded between rollouts frees its device memory and computes the same metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.train.offload import TrainerOffload
from slime.train.topology import Ranks
from slime.train.trainer import Trainer
from tests.megatron.ranks import RankGroup
from tests.megatron.trainings import COMMON, train_rollout
from tests.train.in_process import config_for

Folder = Callable[[str], Path]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "half dp2": ("qwen3", {"dtype": "bfloat16", "use_kl_loss": True, "kl_loss_coef": 0.1}),
    "moe ep2": ("qwen3_moe", {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}


def train_twice(folder: Path, out: Path, flags: dict[str, Any], *, sleeps: bool) -> list[dict[str, float]]:
    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD, torch.device("cpu"))
    config = config_for(folder, out, **COMMON, train_backend="megatron", actor_num_gpus_per_node=ranks.size, **flags)
    try:
        trainer = Trainer(config, "cpu")
        trainer.init(ranks)
        backend = trainer.actor.backend
        if sleeps:
            trainer.sleeper = TrainerOffload([backend], torch.device("cpu"), smallest=0)
        metrics = []
        for rollout_id in range(3):
            trainer.sleep()
            storages = [tensor.untyped_storage() for one in backend.resident() for tensor in one.tensors]
            assert {storage.nbytes() == 0 for storage in storages if storage.nbytes() or sleeps} == {sleeps}
            trainer.wake()
            metrics += train_rollout(trainer, config, rollout_id)
        return metrics
    finally:
        parallel_state.destroy_model_parallel()


def train_with_offload(folder: Path, out: Path, flags: dict[str, Any]) -> list[dict[str, float]]:
    return train_twice(folder, out, flags, sleeps=True)


def train_without_offload(folder: Path, out: Path, flags: dict[str, Any]) -> list[dict[str, float]]:
    return train_twice(folder, out, flags, sleeps=False)


@pytest.mark.parametrize("case", CASES)
def test_offload_between_rollouts_does_not_change_the_metrics(
    case: str, model_folder: Folder, ranks: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    kind, flags = CASES[case]
    expected = ranks(2).run(train_without_offload, model_folder(kind), tmp_path / "a", flags)
    assert ranks(2).run(train_with_offload, model_folder(kind), tmp_path / "b", flags) == expected
