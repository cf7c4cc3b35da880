"""Every estimator learns: short, seeded, whole runs (engine, rollout, trainer, weights) of a tiny model.

The reward is the share of response tokens from one half of the vocabulary. An untrained model gets about one half. The
mean reward of the last rollouts must be clearly above that of the first ones. `tests/examples` covers partial rollouts
(april) and the fully asynchronous mode (fully_async).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.data.sample import Sample
from tests.tiny_models import make_model_folder

pytestmark = pytest.mark.slow

ROLLOUTS = 14
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.01, "num_steps_per_rollout": 2},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.5, "num_steps_per_rollout": 2},
    "reinforce_plus_plus": {
        "advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.001,
    },
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True,
    },
    "ppo": {"advantage_estimator": "ppo", "critic_lr": 3e-3, "lambd": 0.95, "normalize_advantages": True},
    "rloo": {"advantage_estimator": "rloo", "normalize_advantages": True},
    "dr_grpo": {"advantage_estimator": "dr_grpo", "normalize_advantages": True},
    "dapo": {"advantage_estimator": "dapo", "num_steps_per_rollout": 2},
    "tis": {"use_tis": True, "use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "k3"},
    "one-step": {"async_mode": "one-step", "num_rollout": 20},  # off-policy samples need more rollouts
}  # fmt: skip


def share_of_low_tokens(args: Any, sample: Sample) -> float:
    response = sample.tokens[-sample.response_length :]
    return sum(token < 160 for token in response) / len(response)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("learning") / "model", initializer_range=0.02)


@pytest.mark.parametrize("name", RUNS)
def test_estimator_raises_the_reward(name: str, folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(64)))
    result = slime.run(
        hf_checkpoint=str(folder),
        prompt_data=str(prompts),
        reward=share_of_low_tokens,
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        rollout_max_response_len=12,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=4096,
        lr=3e-3,
        progress="none",
        output_dir=str(tmp_path / "out"),
        **{"num_rollout": ROLLOUTS} | RUNS[name],
    )
    rewards = [metrics["rollout/raw_reward"] for metrics in result.metrics]
    first, last = sum(rewards[:2]) / 2, sum(rewards[-2:]) / 2
    assert last > first + 0.2, rewards
    fresh = [metrics for metrics in result.metrics if not metrics.get("rollout/off_policy_token_frac")]
    assert max(metrics["train/train_rollout_logprob_abs_diff"] for metrics in fresh) < 1e-3
