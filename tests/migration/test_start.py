"""Runs started with the flags of upstream's scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import TRAIN, records, run
from tests.tiny_models import make_model_folder

PLUGINS = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post


async def without_log_probs(args, sample, sampling_params):
    state = GenerateState(args)
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"text": sample.prompt, "sampling_params": sampling_params})
    response_ids = state.tokenizer(output["text"], add_special_tokens=False)["input_ids"] or [2]
    sample.tokens = prompt_ids + response_ids
    sample.response = output["text"]
    sample.response_length = len(response_ids)
    sample.loss_mask = [1] * len(response_ids)
    sample.status = sample.Status.COMPLETED
    return sample


async def token_sum(args, sample, **kwargs):
    return float(sum(sample.tokens[-sample.response_length:]) % 7)
"""
FLAGS = [
    *("--hf-checkpoint", "model", "--prompt-data", "sums.jsonl", "--input-key", "prompt", "--label-key", "label"),
    *("--apply-chat-template", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "1"),
    *("--custom-rm-path", "plugins.token_sum", "--use-kl-loss", "--kl-loss-coef", "0.1", "--device", "cpu"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("start")
    make_model_folder(place / "model")
    make_model_folder(place / "tuned", seed=3)
    rows = [{"prompt": [{"role": "user", "content": f"what is {i}+{i}?"}], "label": str(2 * i)} for i in range(4)]
    (place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "plugins.py").write_text(PLUGINS)
    return place


def test_actor_starts_from_ref_load_and_engines_use_its_weights(folder: Path) -> None:
    """--ci-test checks that trainer and engine agree on log-probs, and that the first KL is 0."""
    flags = [
        *FLAGS,
        "--rollout-max-response-len",
        "8",
        "--ref-load",
        "tuned",
        "--load",
        "X",
        "--save",
        "X",
        "--ci-test",
    ]
    done = run([*TRAIN, *flags], folder)
    assert done.code == 0, done.err
    assert "the actor starts from --ref-load tuned" in done.out
    (step,) = records(folder / "X", "train")
    assert step["train/kl_loss"] == pytest.approx(0, abs=1e-8)
    assert step["train/train_rollout_logprob_abs_diff"] < 1e-3


def test_update_weights_interval_of_two_in_the_synchronous_loop(folder: Path) -> None:
    """Flags as documented: no response limit, an evaluation interval without data, checkpoints without a folder.

    The old log-probs come from the weights that sampled, so trainer and engine agree in the stale step too.
    """
    flags = [*FLAGS, "--num-rollout", "3", "--update-weights-interval", "2", "--keep-old-actor", "--lr", "1e-3"]
    more = ["--eval-interval", "50", "--save-interval", "100", "--rollout-max-context-len", "40"]
    done = run([*TRAIN, *flags, *more, "--output-dir", "seldom"], folder)
    assert done.code == 0, done.err
    assert "note: no --rollout-max-response-len: responses end after 128 tokens, SGLang's default" in done.out
    assert "note: --eval-interval 50 without --eval-prompt-data: there is nothing to evaluate" in done.out
    rollouts, steps = records(folder / "seldom", "rollout"), records(folder / "seldom", "train")
    assert [record["rollout/staleness/max"] for record in rollouts] == [0.0, 1.0, 0.0]
    assert [record["rollout/off_policy_token_frac"] for record in rollouts] == [0.0, 1.0, 0.0]
    assert all(step["train/train_rollout_logprob_abs_diff"] < 1e-3 for step in steps)
    assert abs(steps[1]["train/ppo_kl"]) > 1e-6
    assert (folder / "seldom" / "iter_0000002").is_dir()


def test_generate_function_without_log_probs_trains_asynchronously(folder: Path) -> None:
    """The asynchronous driver drops its importance weights with one warning; with --use-tis the run fails."""
    flags = [*FLAGS, "--num-rollout", "3", "--rollout-max-response-len", "8", "--rollout-num-gpus", "1"]
    flags += ["--custom-generate-function-path", "plugins.without_log_probs", "--lr", "1e-3"]
    train_async = [TRAIN[0], str(Path(TRAIN[1]).with_name("train_async.py"))]
    done = run([*train_async, *flags, "--output-dir", "plain"], folder)
    assert done.code == 0, done.err
    assert (done.out + done.err).count("has samples without rollout_log_probs") == 1
    steps = records(folder / "plain", "train")
    assert len(steps) == 3
    assert not any(name.startswith("train/tis") for step in steps for name in step)
    refused = run([*train_async, *flags, "--output-dir", "asked", "--use-tis"], folder)
    assert refused.code == 2
    assert "--use-tis: a sample has no rollout log-probs; its generate function must set them" in refused.err
