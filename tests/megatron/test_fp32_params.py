"""Master weights start from the folder's full-precision values, not from values rounded to the compute dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.models.safetensors_io import open_weights
from slime.train.checkpoints.reader import SavedTensors
from slime.train.topology import Ranks
from slime.train.trainer import Trainer
from tests.megatron.ranks import RankGroup
from tests.megatron.trainings import COMMON
from tests.train.in_process import config_for

PPO = {"advantage_estimator": "ppo"}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("qwen3", {}),
    "dp2, copies": ("qwen3", {"use_distributed_optimizer": False}),
    "tp2, a critic too": ("llama", {"tensor_model_parallel_size": 2, **PPO}),
    "pp2": ("qwen3", {"pipeline_model_parallel_size": 2}),
    "ep2": ("qwen3_moe", {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "frozen dp2": ("qwen3", {"freeze_params_name_list": [r"layers\.[01]\."]}),
}


def save_before_training(folder: Path, out: Path, flags: dict[str, Any]) -> None:
    """Save a checkpoint of the loaded weights before any training."""
    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD, torch.device("cpu"))
    own = {"train_backend": "megatron", "actor_num_gpus_per_node": ranks.size, "dtype": "bfloat16"}
    try:
        trainer = Trainer(config_for(folder, out, **{**COMMON, **own, **flags, "save": str(out / "saved")}), "cpu")
        trainer.init(ranks)
        trainer.save(0)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_master_weights_keep_the_full_precision_of_the_folder(
    layout: str, model_folder: Callable[[str], Path], ranks: Callable[[int], RankGroup], tmp_path: Path
) -> None:
    kind, flags = LAYOUTS[layout]
    ranks(2).run(save_before_training, model_folder(kind), tmp_path, flags)
    source = open_weights(model_folder(kind))
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for _, tensor in source)
    frozen = ("model.layers.0.", "model.layers.1.") if "freeze_params_name_list" in flags else ()
    found = SavedTensors(tmp_path / "saved" / "iter_0000000", "model")
    assert sorted(found.names) == sorted(source.names)
    for name, tensor in source:  # frozen parameters have no master weights
        assert torch.equal(found[name].float(), tensor.bfloat16().float() if name.startswith(frozen) else tensor), name
    if PPO.items() <= flags.items():
        critic = SavedTensors(tmp_path / "saved" / "critic" / "iter_0000000", "model")
        for name, tensor in source:
            assert torch.equal(critic[name], torch.zeros(1, tensor.shape[1]) if name == "lm_head.weight" else tensor)
