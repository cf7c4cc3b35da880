from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import TRAIN, Done, run
from tests.tiny_models import make_model_folder

PLUGINS = """\
import json
import os
import threading

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post

NOTED = ("index", "label", "tokens", "response", "response_length", "weight_versions", "loss_mask", "rollout_log_probs")


def note(args, sample, rollout_id=None, evaluation=False):
    seen = {name: getattr(sample, name) for name in NOTED}
    with open(os.path.join(args.output_dir, "seen.jsonl"), "a") as file:
        file.write(json.dumps({**seen, "rollout_id": rollout_id, "evaluation": evaluation}) + "\\n")


def note_places(args, groups):
    kept = [hasattr(sample.token_array().base, "place") for group in groups for sample in group]
    with open(os.path.join(args.output_dir, "kept.jsonl"), "a") as file:
        file.write(json.dumps(kept) + "\\n")


def token_sum(args, sample):
    \"\"\"Where it is told to, it never comes to an end from some rollout on.\"\"\"
    held_from = int(os.environ.get("HOLD_FROM_ROLLOUT", "1000000"))
    if (GenerateState(args).rollout_id or 0) >= held_from:
        open(os.environ["HELD"], "w").close()
        threading.Event().wait()
    return sum(sample.tokens) % 7 / 7


def partly_broken(args, sample):
    if sample.index % 4 == 0 or sample.index >= 32:
        raise ValueError(f"no verdict on sample {sample.index}")
    return float(sample.index % 2)


def no_parameters():
    return 0.0


async def two_turns(args, sample, sampling_params):
    tokenizer = GenerateState(args).tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    for turn in range(2):
        params = {**sampling_params, "max_new_tokens": 4, "ignore_eos": True}
        answer = await post(url, {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True})
        meta_info = answer["meta_info"]
        log_probs, tokens, _ = zip(*meta_info["output_token_logprobs"])
        sample.append_response_tokens(
            args, tokens=tokens, log_probs=log_probs, meta_info=meta_info, text=answer["text"]
        )
        if turn == 0:
            result = tokenizer(" the answer is 46. ", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=result, trainable=False, text=" the answer is 46. ")
    return sample
"""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's working folder: two models, chat prompts, a plugin file, and a decoy package `slime` that no process of
    a run may import."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "slime").mkdir()
    (folder / "slime" / "__init__.py").write_text("raise ImportError('this is another slime')\n")
    make_model_folder(folder / "model")
    make_model_folder(folder / "wider", intermediate_size=128)
    sums = [
        {"messages": [{"role": "user", "content": f"what is {i}+{i + 1}?"}], "label": str(2 * i + 1)} for i in range(12)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "plugins.py").write_text(PLUGINS)
    return folder


def grpo_flags() -> list[str]:
    """Returns the flags of the documentation, for 16 samples per rollout in two optimizer steps."""
    return [
        "--hf-checkpoint",
        "model",
        "--prompt-data",
        "sums.jsonl",
        "--input-key",
        "messages",
        "--label-key",
        "label",
        "--apply-chat-template",
        "--rollout-shuffle",
        "--rollout-batch-size",
        "4",
        "--n-samples-per-prompt",
        "4",
        "--global-batch-size",
        "8",
        "--rollout-max-response-len",
        "8",
        "--rollout-temperature",
        "0.9",
        "--rollout-top-p",
        "1.0",
        "--rollout-top-k",
        "-1",
        "--advantage-estimator",
        "grpo",
        "--use-kl-loss",
        "--kl-loss-coef",
        "0.01",
        "--kl-loss-type",
        "low_var_kl",
        "--entropy-coef",
        "0.001",
        "--eps-clip",
        "0.2",
        "--eps-clip-high",
        "0.28",
        "--optimizer",
        "adam",
        "--lr",
        "1e-3",
        "--lr-decay-style",
        "constant",
        "--weight-decay",
        "0.1",
        "--adam-beta1",
        "0.9",
        "--adam-beta2",
        "0.98",
        "--custom-rm-path",
        "plugins.py:token_sum",
        "--rollout-sample-hook-path",
        "plugins.py:note",
        "--use-dynamic-batch-size",
        "--max-tokens-per-gpu",
        "256",
        "--device",
        "cpu",
        "--seed",
        "7",
    ]


def eval_flags() -> list[str]:
    return [
        "--eval-prompt-data",
        "first",
        "sums.jsonl@[0:4]",
        "last",
        "sums.jsonl@[8:12]",
        "--eval-interval",
        "2",
        "--n-samples-per-eval-prompt",
        "2",
        "--eval-max-response-len",
        "6",
    ]


@pytest.fixture(scope="session")
def whole_run(place: Path) -> tuple[Path, Done]:
    """An uninterrupted run of four rollouts, the reference for other tests."""
    flags = [*grpo_flags(), *eval_flags(), "--num-rollout", "4", "--save", "whole", "--save-interval", "2"]
    done = run([*TRAIN, *flags, "--ci-test", "--save-hf", "whole/hf_{rollout_id}"], place)
    assert done.code == 0, done.err
    return place / "whole", done
