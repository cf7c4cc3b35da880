"""The plan's weight counts match the parameters that the processes of a layout hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.config.initial_weights import InitialWeights
from slime.driver.plan.megatron import count_stage_weights, family_fields
from slime.models.shape import ModelShape
from slime.train.backends.megatron.builder import MegatronBuilder
from slime.train.timers import RankProgress
from slime.train.topology import Ranks
from tests.megatron.ranks import RankGroup
from tests.train.in_process import config_for

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("llama", {"tensor_model_parallel_size": 2}),
    "pp2": ("qwen3", {"pipeline_model_parallel_size": 2}),
    "interleaved": (
        "llama",
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    ),
    "ep2": ("qwen3_moe", {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}


def count(folder: Path, out: Path, flags: dict[str, Any]) -> tuple[int, int]:
    """Planned and actual number of elements of this process."""
    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD, torch.device("cpu"))
    config = config_for(folder, out, train_backend="megatron", actor_num_gpus_per_node=ranks.size, **flags)
    try:
        builder = MegatronBuilder(config, ranks, compute_dtype=torch.float32, progress=RankProgress())
        backend = builder.policy(config, InitialWeights())
        stage = parallel_state.get_pipeline_model_parallel_rank()
        planned = count_stage_weights(config, ModelShape.from_folder(folder), family_fields(folder), stage)
        parameters = [one for part in backend.model.stages for one in part.parameters()]
        return planned.total, sum(parameter.numel() for parameter in parameters)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_weight_count_is_within_two_percent(
    layout: str, ranks: Callable[[int], RankGroup], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, flags = LAYOUTS[layout]
    for planned, real in ranks(2).run(count, model_folder(model), tmp_path, flags):
        assert planned == pytest.approx(real, rel=0.02)  # norms and routers are replicated
