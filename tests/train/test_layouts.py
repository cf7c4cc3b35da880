"""Tests that every process layout gives the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.train.trainer_group import TrainerGroup
from tests.rows import some
from tests.train.in_process import config_for
from tests.train.tiny_training import export_weights, make_samples

Folder = Callable[[str], Path]
Numbers = tuple[list[dict[str, float]], dict[str, torch.Tensor]]

ROLLOUTS = 3
LOSSES = "slime.backends.megatron_utils.loss"
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("qwen3", {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01, "normalize_advantages": True}),
    "ppo": ("qwen3", {"advantage_estimator": "ppo", "kl_coef": 0.05, "normalize_advantages": True}),
    "moe": ("qwen3_moe", {"use_tis": True, "tis_batch_normalize": True}),
    "lora": (
        "qwen3",
        {"lora_rank": 2, "lora_alpha": 32.0, "use_kl_loss": True, "kl_loss_coef": 0.1, "keep_old_actor": True},
    ),
    "custom loss": (
        "qwen3",
        {"loss_type": "custom_loss", "custom_loss_function_path": f"{LOSSES}.policy_loss_function"},
    ),
}
"""Model and flags of each training. `train` makes updates proportional to the gradient to limit rounding errors."""

CONTEXT = {"context_parallel_size": 2}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "2": ("grpo", 2, {}),
    "4, by tokens": ("grpo", 4, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30}),
    "8, some without samples": ("grpo", 8, {}),
    "2 copies of 2": ("grpo", 4, {"fsdp_shard_size": 2}),
    "4 copies": ("grpo", 4, {"fsdp_shard_size": 1}),
    "ppo, 2 copies of 2": ("ppo", 4, {"fsdp_shard_size": 2}),
    "moe, 2 copies of 2, recomputed": ("moe", 4, {"fsdp_shard_size": 2, "recompute_activations": True}),
    "lora, 3, one without rows": ("lora", 3, {}),
    "lora, 2 copies of 2": ("lora", 4, {"fsdp_shard_size": 2}),
    "2 of a context": ("grpo", 2, CONTEXT),
    "2 contexts, by tokens": ("grpo", 4, {**CONTEXT, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 30}),
    "8: 2 contexts on each of 2 copies": ("grpo", 8, {**CONTEXT, "fsdp_shard_size": 4}),
    "ppo, 2 contexts on 2 copies": ("ppo", 4, {**CONTEXT, "fsdp_shard_size": 2}),
    "moe, a context on 4 copies": ("moe", 4, {"context_parallel_size": 4, "fsdp_shard_size": 1}),
    "custom loss, 2 of a context": ("custom loss", 2, CONTEXT),
    "lora, 2 of a context": ("lora", 2, CONTEXT),
}
"""Training, number of processes and flags of each layout."""


def train(model_folder: Folder, training: str, out: Path, **flags: Any) -> Numbers:
    """Return every metric of three rollouts, and the weights after them."""
    model, own = TRAININGS[training]
    common = {"lr": 0.1, "adam_eps": 1.0, "global_batch_size": 9, "micro_batch_size": 2}
    config = config_for(model_folder(model), out, **common, **own, **flags)
    metrics = []
    with TrainerGroup(config, device="cpu", run_dir=out) as group:
        group.start()
        for rollout_id in range(ROLLOUTS):
            result = group.train(rollout_id, make_samples(3, 3, seed=rollout_id))
            rollout = {name: value for name, value in result.rollout_metrics.items() if not name.startswith("perf/")}
            metrics += [*result.metrics, rollout]
        weights: dict[str, torch.Tensor] = {}
        for path in export_weights(group, out / "weights", version=1):
            weights |= load_file(path)
    return metrics, weights


@pytest.fixture(scope="module")
def one_process(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Numbers]:
    made: dict[str, Numbers] = {}

    def numbers(training: str) -> Numbers:
        if training not in made:
            made[training] = train(model_folder, training, tmp_path_factory.mktemp("one"))
        return made[training]

    return numbers


@pytest.mark.parametrize(
    "layout",
    some(
        [
            "ppo, 2 copies of 2", "moe, 2 copies of 2, recomputed", "lora, 3, one without rows",
            "2 contexts, by tokens", "custom loss, 2 of a context",
        ],
        of=LAYOUTS,
    ),
)  # fmt: skip
def test_layouts_match_one_process(
    layout: str, one_process: Callable[[str], Numbers], model_folder: Folder, tmp_path: Path
) -> None:
    training, processes, flags = LAYOUTS[layout]
    metrics, weights = train(model_folder, training, tmp_path, actor_num_gpus_per_node=processes, **flags)
    expected, expected_weights = one_process(training)
    assert len(metrics) == 2 * ROLLOUTS
    for found, wanted in zip(metrics, expected, strict=True):
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected_weights[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("training", ["grpo", "lora"])
def test_weights_change_by_more_than_the_comparison_tolerance(
    training: str, one_process: Callable[[str], Numbers], model_folder: Folder
) -> None:
    _, weights = one_process(training)
    before = load_file(model_folder("qwen3") / "model.safetensors")
    assert max(float((tensor - before[name]).abs().max()) for name, tensor in weights.items()) > 1e-3
