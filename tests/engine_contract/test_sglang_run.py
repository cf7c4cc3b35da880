"""Whole runs with real SGLang servers behind a real sglang-router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import get_model_url
from tests.engine_contract.conftest import CONTEXT
from tests.engine_contract.engines import ROUTER_PYTHON, TRANSPORTS, Engine, engine_flags
from tests.tiny_models import make_model_folder

ROLLOUTS = 6


def share_of_low_tokens(args: Any, sample: Sample) -> float:
    """Reward as in tests/learning: rises when the model learns to use one half of the vocabulary."""
    assert get_model_url(args, "default").endswith(f":{args.sglang_router_port}/generate")
    response = sample.tokens[-sample.response_length :]
    return sum(token < 160 for token in response) / len(response)


def rising_rewards(tmp_path: Path, **flags: Any) -> Path:
    """Run training whose rewards must rise; return the run folder."""
    folder = make_model_folder(tmp_path / "model", initializer_range=0.02, max_position_embeddings=CONTEXT)
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
        rollout_router="sglang",
        carried={"router_policy": "round_robin"},
        output_dir=str(tmp_path / "out"),
        **flags,
    )
    rewards = [metrics["rollout/raw_reward"] for metrics in result.metrics]
    assert len(rewards) == ROLLOUTS
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.15, rewards
    assert max(metrics["train/train_rollout_logprob_abs_diff"] for metrics in result.metrics) < 1e-3
    return result.run_dir


@pytest.mark.timeout(1800)
def test_run_with_own_servers_learns(tmp_path: Path) -> None:
    flags = engine_flags("sglang") | TRANSPORTS["disk"]
    logs = rising_rewards(tmp_path, rollout_num_gpus=2, **flags) / "logs"
    assert (logs / "router.log").exists()
    for number in range(2):  # round robin: each server has generated
        assert "POST /generate" in (logs / f"engine-{number}.log").read_text()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("running", ["sglang"], indirect=True)
@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "disk"])
def test_run_learns_with_each_transport(
    transport: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attaches to the server of the other tests, because starting a server takes most of a run's time."""
    assert engine.fleet.key
    monkeypatch.setenv("SLIME_ENGINE_API_KEY", engine.fleet.key)
    flags = {"device": "cpu", "sglang_router_python": ROUTER_PYTHON} | TRANSPORTS[transport]
    rising_rewards(tmp_path, rollout_external_engine_addrs=[engine.url.removeprefix("http://")], **flags)
    assert engine.version() == str(ROLLOUTS)
