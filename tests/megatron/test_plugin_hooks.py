"""User hooks called inside Megatron: call times and arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.errors import UserError
from tests.megatron.ranks import RankGroup
from tests.megatron.trainings import ROLLOUTS, run_layout

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
HOOKS = {
    "custom_megatron_init_path": str(PLUGINS / "megatron_init.py"),
    "custom_megatron_before_log_prob_hook_path": str(PLUGINS / "before_log_prob.py"),
    "custom_megatron_before_train_step_hook_path": str(PLUGINS / "before_train_step.py"),
    "custom_model_provider_path": str(PLUGINS / "model_provider.py"),
}


def run_with_hooks(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Train with all hooks; return this process's parts of the trained weights."""
    flags: dict[str, Any] = {
        "pipeline_model_parallel_size": 2,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "num_steps_per_rollout": 3,
        "global_batch_size": 3,
    }
    numbers = run_layout(folder, out, {**flags, **HOOKS})
    return {name: part for name, pieces in numbers.weights.items() for _, part in pieces}


def test_hooks_get_their_arguments_and_provider_freezes_routers(
    ranks: Callable[[int], RankGroup], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("qwen3_moe")
    weights = ranks(2).run(run_with_hooks, folder, tmp_path)
    for rank in range(2):
        assert (tmp_path / f"megatron_{rank}.txt").read_text() == f"rank {rank} of 2, TP 1\n"
        steps = [line.split() for line in (tmp_path / f"steps_{rank}.txt").read_text().splitlines()]
        assert [line[:3] for line in steps] == [
            [str(rollout), str(step), "0.1"] for rollout in range(ROLLOUTS) for step in range(3)
        ]
        prefixes = [line.split()[0] for line in (tmp_path / f"log_probs_{rank}.txt").read_text().splitlines()]
        assert prefixes == ["policy", "ref_"] * ROLLOUTS
    before = load_file(folder / "model.safetensors")
    trained = {name: part for rank in weights for name, part in rank.items()}
    routers = [name for name in trained if name.endswith("mlp.gate.weight")]
    assert routers
    assert all(torch.equal(trained[name], before[name]) for name in routers), "frozen by the provider"
    assert not torch.equal(trained["model.norm.weight"], before["model.norm.weight"])


def returns_nothing(pre_process: bool, post_process: bool) -> None:
    return None


def run_with_bad_provider(folder: Path, out: Path) -> str:
    with pytest.raises(UserError) as caught:
        run_layout(folder, out, {"custom_model_provider_path": f"{__name__}.returns_nothing"})
    return str(caught.value)


def test_rejects_a_model_provider_that_returns_none(
    ranks: Callable[[int], RankGroup], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    (sentence,) = ranks(1).run(run_with_bad_provider, model_folder("qwen3"), tmp_path)
    assert sentence == (
        "--custom-model-provider-path tests.megatron.test_plugin_hooks.returns_nothing returned a NoneType: a GPTModel of "
        "megatron.core is needed"
    )
