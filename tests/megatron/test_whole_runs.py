"""Whole runs with Megatron trainers: updated weights reach the engines, and the reward rises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slime
from tests.learning.test_learning import share_of_low_tokens
from tests.rows import some
from tests.tiny_models import make_model_folder

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp2 x pp2": (
        "qwen3",
        {},
        {"actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    ),
    "experts, ep2": (
        "qwen3_moe",
        EXPERTS,
        {"actor_num_gpus_per_node": 2, "expert_model_parallel_size": 2, "save_and_go_on": True},
    ),
}
ROLLOUTS = 14


@pytest.mark.parametrize("name", some(["experts, ep2"], of=RUNS))
def test_reward_rises_and_engines_follow_the_trainer(name: str, tmp_path: Path) -> None:
    model_type, shape, flags = RUNS[name]
    folder = make_model_folder(tmp_path / "model", model_type, initializer_range=0.02, **shape)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(64)))
    flags = dict(flags)
    goes_on = flags.pop("save_and_go_on", False)

    def run(**more: Any) -> list[dict[str, float]]:
        result = slime.run(
            hf_checkpoint=str(folder),
            prompt_data=str(prompts),
            reward=share_of_low_tokens,
            train_backend="megatron",
            rollout_num_gpus=1,
            rollout_batch_size=8,
            n_samples_per_prompt=8,
            rollout_max_response_len=12,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=4096,
            lr=3e-3,
            progress="none",
            output_dir=str(tmp_path / "out"),
            **flags,
            **more,
        )
        return list(result.metrics)

    if goes_on:  # both ranks save halfway, and a second run resumes
        kept = str(tmp_path / "kept")
        saving = {"save": kept, "load": kept, "lr_decay_iters": ROLLOUTS}
        metrics = run(num_rollout=ROLLOUTS // 2, **saving) + run(num_rollout=ROLLOUTS, **saving)
    else:
        metrics = run(num_rollout=ROLLOUTS)
    rewards = [one["rollout/raw_reward"] for one in metrics]
    assert len(rewards) == ROLLOUTS
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2, rewards
    assert max(one["train/train_rollout_logprob_abs_diff"] for one in metrics) < 1e-3
