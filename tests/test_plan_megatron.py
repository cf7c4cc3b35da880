"""Memory estimate of Megatron trainers: the effect of each layout flag, in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, parse_args
from slime.config.resolve import derive
from slime.driver.plan.megatron import check_layout, count_stage_weights, estimate_trainer, megatron_memory
from slime.models.catalog import published_models
from slime.models.families.family import family_of
from slime.models.models_cli import layout_words
from slime.models.shape import ModelShape
from tests.test_plan_layout import DENSE, EXPERTS
from tools.model_plans import WORKLOAD

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VOCABULARY = 128 * 64  # 99 rows, padded
LAYER = 64 * 8 * (8 + 4 + 4 + 8) + 3 * 64 * 96 + 2 * 64 + 2 * 8
EXPERT = 3 * 64 * 36


def memory(model: dict[str, Any], **flags: Any) -> dict[str, int]:
    config = _config(**flags)
    shape, fields = ModelShape.from_config(model), family_of(model).fields(model)
    return megatron_memory(config, shape, fields, device="cuda").parts


def _config(**flags: Any) -> Config:
    base = {"train_backend": "megatron", "rollout_batch_size": 64, "dtype": "bfloat16", "rollout_max_response_len": 100}
    lengths = {"rollout_max_context_len": 128, "actor_num_gpus_per_node": 8}
    return derive(Config(**{**base, **lengths, **flags}))


def weights(model: dict[str, Any], rank: int = 0, **flags: Any) -> tuple[int, int]:
    shape, fields = ModelShape.from_config(model), family_of(model).fields(model)
    stage = count_stage_weights(_config(**flags), shape, fields, rank)
    return stage.dense, stage.experts


def test_weights_per_rank() -> None:
    untied = VOCABULARY
    assert weights(DENSE) == (2 * untied + 12 * LAYER, 0)
    assert weights({**DENSE, "tie_word_embeddings": True}) == (untied + 12 * LAYER, 0)
    assert weights(DENSE, **{TP: 2}) == ((2 * 2 * untied + 12 * LAYER) // 2, 0)  # padded to a multiple of 256 rows
    assert weights(DENSE, **{PP: 4}) == (untied + 3 * LAYER, 0)
    assert weights(DENSE, 1, **{PP: 4}) == (3 * LAYER, 0)
    assert weights({**DENSE, "tie_word_embeddings": True}, 3, **{PP: 4}) == (untied + 3 * LAYER, 0)
    cut = {PP: 2, EP: 4, ETP: 1, "decoder_first_pipeline_num_layers": 5}
    assert weights(EXPERTS, 0, **cut)[1] == 5 * 2 * EXPERT
    assert weights(EXPERTS, 1, **cut)[1] == 7 * 2 * EXPERT
    some = {**EXPERTS, "mlp_only_layers": [0, 1, 2, 3]}
    assert weights(some, 0, **{PP: 3, "actor_num_gpus_per_node": 6})[1] == 0
    assert weights(some, 0, **{PP: 2, "num_virtual_stages_per_pipeline_rank": 3})[1] == 4 * 8 * EXPERT


def test_optimizer_states_are_sharded_over_data_parallel_ranks() -> None:
    count = 2 * VOCABULARY + 12 * LAYER
    own = memory(DENSE)
    assert (own["weights"], own["gradients"], own["optimizer"]) == (2 * count, 4 * count, 12 * -(-count // 8))
    assert memory(DENSE, use_distributed_optimizer=False)["optimizer"] == 12 * count
    assert memory(DENSE, dtype="float32")["optimizer"] == 8 * -(-count // 8)
    assert memory(DENSE, **{CP: 2})["optimizer"] == own["optimizer"]  # context-parallel ranks share it too
    dense, experts = weights(EXPERTS, **{EP: 4})
    assert memory(EXPERTS, **{EP: 4})["optimizer"] == 12 * (-(-dense // 8) + -(-experts // 2))
    assert memory(DENSE, use_kl_loss=True, kl_loss_coef=0.1)["reference"] == own["weights"]


def test_activation_memory_follows_the_layout() -> None:
    whole = memory(DENSE)["activations"]
    layer = (whole - 128 * (4 + 3 * 2) * 64) // 12
    split, sequence = memory(DENSE, **{TP: 2})["activations"], memory(DENSE, **{TP: 2}, sequence_parallel=True)
    assert sequence["activations"] < split < whole
    assert sequence["activations"] - 128 * (4 + 3 * 2) * 64 == 12 * layer // 2
    first = memory(DENSE, **{PP: 4})
    assert first["activations"] == 4 * 3 * layer  # as many micro-batches in flight as there are stages
    again = memory(DENSE, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    assert again["activations"] == 6 * 128 * 64 * 2 + 2 * layer + 128 * (4 + 3 * 2) * 64
    block = memory(DENSE, recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    assert block["activations"] == 2 * 128 * 64 * 2 + 10 * layer + layer + 128 * (4 + 3 * 2) * 64


@pytest.mark.parametrize(
    ("virtual", "kept"),
    [(3, (2 * 1 + 2 * 2 + 1) / 3), (2, (2 * 1 + 1 * 2 + 1) / 2)],
)
def test_interleaved_stages_keep_more_activations(virtual: int, kept: float) -> None:
    layer = memory(DENSE, **{PP: 2, "decoder_first_pipeline_num_layers": 6})["activations"] / (2 * 6)
    found = memory(DENSE, **{PP: 2, "num_virtual_stages_per_pipeline_rank": virtual})["activations"]
    assert found == int(kept * 6 * layer)


@pytest.mark.parametrize("name", published_models())
def test_layouts_of_published_models_are_valid_and_fit(name: str, tmp_path: Path) -> None:
    model = published_models()[name]
    model.write(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1", "label": "2"}\n')
    words = ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "prompts.jsonl"), *WORKLOAD.split()]
    config = parse_args([*words, *layout_words(model), "--dry-run"])
    if config.train_backend == "megatron":
        check_layout(config, device="cuda")
    nodes, gpus, gib = (int(part) for part in model.cluster.split("x"))
    shape = ModelShape.from_folder(tmp_path)
    assert estimate_trainer(config, shape, device="cuda", trainers=nodes * gpus).total < gib * 2**30
