"""Whole runs with real SGLang servers behind a real sglang-router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import get_model_url
from tests.engine_contract.engines import TRANSPORTS, engine_flags
from tests.tiny_models import make_model_folder

ROLLOUTS = 6


def share_of_low_tokens(args: Any, sample: Sample) -> float:
    """As in tests/learning: rises when the model learns to use one half of the vocabulary."""
    assert get_model_url(args, "default").endswith(f":{args.sglang_router_port}/generate")
    response = sample.tokens[-sample.response_length :]
    return sum(token < 160 for token in response) / len(response)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_reward_rises(transport: str, tmp_path: Path) -> None:
    engines = 2 if transport == "disk" else 1  # starting a server is most of the time this takes
    folder = make_model_folder(tmp_path / "model", initializer_range=0.02)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(64)))
    result = slime.run(
        hf_checkpoint=str(folder),
        prompt_data=str(prompts),
        reward=share_of_low_tokens,
        num_rollout=ROLLOUTS,
        rollout_batch_size=16,
        n_samples_per_prompt=8,
        rollout_max_response_len=12,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=4096,
        lr=1e-2,
        progress="none",
        rollout_num_gpus=engines,
        rollout_router="sglang",
        carried={"router_policy": "round_robin"},
        output_dir=str(tmp_path / "out"),
        **TRANSPORTS[transport],
        **engine_flags("sglang"),
    )
    rewards = [metrics["rollout/raw_reward"] for metrics in result.metrics]
    assert len(rewards) == ROLLOUTS
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.15, rewards
    assert max(metrics["train/train_rollout_logprob_abs_diff"] for metrics in result.metrics) < 1e-3
    logs = tmp_path / "out" / "logs"
    assert (logs / "router.log").exists()
    for number in range(engines):  # round robin: each of them has generated
        assert "POST /generate" in (logs / f"engine-{number}.log").read_text()
