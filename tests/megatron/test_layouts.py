"""Metrics and weights after three rollouts match one FSDP process, in every Megatron layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.family_models import FAMILY_MODELS
from tests.megatron.ranks import RankGroup
from tests.megatron.trainings import (
    COMMON,
    ROLLOUTS,
    Numbers,
    folder_shapes,
    run_layout,
    run_with_skipped_step,
    samples_for,
)
from tests.rows import some
from tests.train.in_process import InProcess, config_for
from tests.train.tiny_training import CONFIGS

Folder = Callable[[str], Path]

LOSSES = "slime.backends.megatron_utils.loss"
KEPT = {"keep_old_actor": True, "num_steps_per_rollout": 3, "global_batch_size": 3}
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("qwen3", {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01, "normalize_advantages": True}),
    "untied": ("llama", {"entropy_coef": 0.01}),
    "ppo": ("qwen3", {"advantage_estimator": "ppo", "kl_coef": 0.05, "normalize_advantages": True}),
    "custom loss": (
        "llama",
        {"loss_type": "custom_loss", "custom_loss_function_path": f"{LOSSES}.policy_loss_function"},
    ),
    "followed": (
        "qwen3",
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1, "ref_update_decay": 0.5, **KEPT},
    ),
    "stateless": ("llama", {"use_stateless_adam": True, "weight_decay": 0.1, "lr": 0.01, "clip_grad": 0.01}),
    "frozen": ("qwen3", {"freeze_params_name_list": [r"layers\.[01]\."], "weight_decay": 0.1}),
    "latent": ("deepseek_v3", {"entropy_coef": 0.01}),
    "sinks": ("gpt_oss", {"entropy_coef": 0.01}),
    "glm": ("glm4_moe", {"entropy_coef": 0.01}),
    "moe": ("qwen3_moe", {"use_tis": True, "tis_batch_normalize": True}),
    "engine's experts": ("qwen3_moe", {"use_rollout_routing_replay": True, "use_kl_loss": True, "kl_loss_coef": 0.1}),
    "own experts": ("qwen3_moe", {"use_routing_replay": True, "num_steps_per_rollout": 3, "global_batch_size": 3}),
}
TP, SP, PP, CP, EP = (
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
    {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
)
INTERLEAVED = {**PP, "num_layers_per_virtual_pipeline_stage": 1}
COPIED = {"use_distributed_optimizer": False}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("grpo", 1, {}),
    "tp2": ("grpo", 2, TP),
    "tp2 sp": ("grpo", 2, SP),
    "pp2": ("grpo", 2, PP),
    "pp2 interleaved": ("grpo", 2, INTERLEAVED),
    "dp2": ("grpo", 2, {}),
    "dp2, copies": ("grpo", 2, COPIED),
    "cp2": ("grpo", 2, CP),
    "untied pp2": ("untied", 2, PP),
    "moe pp2": ("moe", 2, PP),
    "moe pp2 interleaved": ("moe", 2, INTERLEAVED),
    "moe dp2": ("moe", 2, {}),
    "moe cp2": ("moe", 2, CP),
    "moe ep2": ("moe", 2, EP),
    "moe ep2, copies": ("moe", 2, {**EP, **COPIED}),
    "latent tp2 sp": ("latent", 2, SP),
    "latent pp2": ("latent", 2, PP),
    "sinks tp2 sp": ("sinks", 2, {**SP, "expert_tensor_parallel_size": 1}),
    "sinks ep2": ("sinks", 2, EP),
    "glm pp2": ("glm", 2, PP),
    "glm ep2": ("glm", 2, EP),
    "stateless dp2": ("stateless", 2, {}),
    "engine's experts pp2 interleaved, recomputed": ("engine's experts", 2, {**INTERLEAVED, **RECOMPUTED}),
    "engine's experts cp2 ep2": ("engine's experts", 2, {**CP, **EP}),
    "own experts ep2": ("own experts", 2, EP),
    "own experts pp2": ("own experts", 2, PP),
    "ppo tp2 sp": ("ppo", 2, SP),
    "ppo pp2": ("ppo", 2, PP),
    "custom loss cp2": ("custom loss", 2, CP),
    "custom loss tp2 sp": ("custom loss", 2, SP),
    "followed pp2": ("followed", 2, PP),
    "followed tp2": ("followed", 2, TP),
    "frozen pp2": ("frozen", 2, PP),
    "frozen dp2, copies": ("frozen", 2, COPIED),
    "recomputed tp2 sp": ("grpo", 2, {**SP, **RECOMPUTED}),
    "dp2, overlapping": ("grpo", 2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tp2 pp2": ("grpo", 4, {**TP, **PP}),
    "tp2 pp2 interleaved": ("grpo", 4, {**TP, **INTERLEAVED}),
    "moe tp2 sp pp2": ("moe", 4, {**SP, **PP}),
    "moe tp2 sp, experts cut": ("moe", 2, SP),
    "moe tp2 sp, experts whole": ("moe", 2, {**SP, "expert_tensor_parallel_size": 1}),
    "moe tp2 sp ep2 dp2": ("moe", 4, {**SP, **EP}),
    "engine's experts tp2 sp ep2 cp2": ("engine's experts", 4, {**SP, **EP, **CP}),
    "tp2 sp cp2 pp2": ("grpo", 8, {**SP, **CP, **PP}),
    "moe tp2 sp pp2 ep2 dp2": ("moe", 8, {**SP, **PP, **EP}),
}
"""Name of the training, number of processes, and flags of each layout."""
WITHIN_OTHERS = {
    "tp2", "pp2", "pp2 interleaved", "moe pp2", "moe pp2 interleaved", "moe dp2", "moe cp2", "moe ep2", "moe tp2 sp pp2",
    "moe tp2 sp ep2 dp2", "glm ep2", "sinks ep2", "followed tp2", "custom loss tp2 sp", "ppo pp2", "own experts pp2",
    "latent pp2", "frozen dp2, copies", "engine's experts cp2 ep2",
}  # fmt: skip
"""Layouts covered by larger layouts, or whose training another layout covers: run by `make test-long` only."""


@pytest.fixture(scope="module")
def folder_of(model_folder: Folder, family_folder: Folder) -> Folder:
    return lambda model: (
        family_folder(model) if model in FAMILY_MODELS and model not in CONFIGS else model_folder(model)
    )


@pytest.fixture(scope="module")
def by_fsdp(folder_of: Folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, tuple[list[dict[str, float]], dict[str, Tensor]]] = {}

    def numbers(training: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
        if training not in made:
            model, flags = TRAININGS[training]
            alone = InProcess(config_for(folder_of(model), tmp_path_factory.mktemp("one"), **{**COMMON, **flags}))
            metrics = []
            for rollout_id in range(ROLLOUTS):
                result = alone.train(rollout_id, samples_for(alone.config, rollout_id))
                rollout = {
                    name: value for name, value in result["rollout_metrics"].items() if not name.startswith("perf/")
                }
                metrics += [*result["metrics"], rollout]
            backend = alone.trainer.actor.backend
            weights = {
                name: tensor.clone()
                for bucket in backend.export.buckets(backend.export.plan(torch.float32, 1 << 30))
                for name, tensor in (bucket.tensors or {}).items()
            }
            made[training] = metrics, weights
        return made[training]

    return numbers


def assemble_weights(ranks: list[Numbers], folder: Path) -> dict[str, Tensor]:
    """Assemble the folder's tensors from the pieces of all ranks; ranks with the same region must agree exactly."""
    weights = {name: torch.full(shape, float("nan")) for name, shape in folder_shapes(folder).items()}
    for rank in ranks:
        for name, pieces in rank.weights.items():
            for region, piece in pieces:
                before = weights[name][region]
                assert before.isnan().all() or torch.equal(before, piece), f"{name} differs between ranks"
                weights[name][region] = piece
    return weights


@pytest.mark.parametrize("layout", some(LAYOUTS.keys() - WITHIN_OTHERS, of=LAYOUTS))
def test_layout_matches_metrics_and_weights_of_one_fsdp_process(
    layout: str,
    ranks: Callable[[int], RankGroup],
    by_fsdp: Callable[[str], Any],
    folder_of: Folder,
    tmp_path: Path,
) -> None:
    training, processes, flags = LAYOUTS[layout]
    model, own = TRAININGS[training]
    folder = folder_of(model)
    found = ranks(processes).run(run_layout, folder, tmp_path, {**own, **flags})
    expected, expected_weights = by_fsdp(training)
    for rank in found:
        for metrics, wanted in zip(rank.metrics, expected, strict=True):
            assert metrics.keys() == wanted.keys()
            assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    weights = assemble_weights(found, folder)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("flags", [PP, TP | {"use_distributed_optimizer": False}, EP], ids=["pp2", "tp2", "ep2"])
def test_all_ranks_skip_a_step_with_an_infinite_gradient(
    flags: dict[str, Any], ranks: Callable[[int], RankGroup], model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3_moe" if flags is EP else "llama")
    for skipped, passed, without in ranks(2).run(run_with_skipped_step, folder, tmp_path, flags):
        assert skipped == [0.0, 1.0, 0.0]
        assert passed.weights.keys() == without.weights.keys()
        for name, pieces in passed.weights.items():
            for (_, piece), (_, wanted) in zip(pieces, without.weights[name], strict=True):
                assert torch.equal(piece, wanted), name


@pytest.mark.parametrize("training", TRAININGS)
def test_training_changes_weights_by_more_than_the_tolerance(
    training: str, by_fsdp: Callable[[str], Any], folder_of: Folder
) -> None:
    _, weights = by_fsdp(training)
    before = load_file(folder_of(TRAININGS[training][0]) / "model.safetensors")
    assert max(float((tensor - before[name]).abs().max()) for name, tensor in weights.items()) > 1e-3


@pytest.mark.parametrize("flags", [SP, {}], ids=["tp2 sp", "dp2"])
def test_bfloat16_training_stays_close_to_fsdp(
    flags: dict[str, Any], ranks: Callable[[int], RankGroup], model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    half = {"dtype": "bfloat16", "entropy_coef": 0.01}
    alone = InProcess(config_for(folder, tmp_path, **{**COMMON, **half}))
    expected = [alone.train(number, samples_for(alone.config, number))["metrics"][0] for number in range(ROLLOUTS)]
    found = ranks(2).run(run_layout, folder, tmp_path, {**half, **flags})
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        got = [metrics[name] for metrics in found[0].metrics if name in metrics]
        assert got == pytest.approx([metrics[name] for metrics in expected], rel=0.03, abs=0.003)
    wanted = alone.weights
    for name, tensor in assemble_weights(found, folder).items():
        torch.testing.assert_close(tensor, wanted[name], rtol=2**-7, atol=3e-3, msg=lambda m, n=name: f"{n}: {m}")
