"""Debug modes: rollouts without training, training on dumped rollouts, evaluation only; and partial rollouts."""

from __future__ import annotations

import json
import sqlite3
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.config import load_config
from slime.rollout.base_types import leaves
from slime.rollout.debug_data import read_dump, write_dump
from tests.e2e.conftest import eval_flags, grpo_flags
from tests.e2e.runs import TRAIN, records, run
from tests.tiny_models import make_model_folder

LOGS = """\
import json


def rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    with open("logged.jsonl", "a") as file:
        row = [rollout_id, len(samples), rollout_extra_metrics["rollout/raw_reward"], rollout_time > 0]
        file.write(json.dumps(row) + "\\n")
    return rollout_id == 1


def evaluation(rollout_id, args, data, extra_metrics):
    with open("logged.jsonl", "a") as file:
        file.write(json.dumps([f"eval {rollout_id}", sorted(data), extra_metrics["eval/few"]]) + "\\n")
    return True
"""

UNEVEN = """\
from slime.rollout.sglang_rollout import generate as one


async def generate(args, sample, sampling_params):
    length = 200 if sample.group_index % 2 else 4
    return await one(args, sample, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})
"""


def losses_and_grad_norms(run_dir: Path) -> list[tuple[float, float]]:
    return [(record["train/loss"], record["train/grad_norm"]) for record in records(run_dir, "train")]


@pytest.fixture(scope="module")
def dumped(place: Path) -> Path:
    """Dumps of a run of two rollouts with --offload, in which engines and trainers use the memory in turn."""
    flags = [*grpo_flags(), "--offload", "--num-rollout", "2", "--save-debug-rollout-data", "dumps/{rollout_id}.jsonl"]
    done = run([*TRAIN, *flags, "--output-dir", "dumping"], place)
    assert (done.code, done.err) == (0, "")
    return place / "dumps"


def without_prompts(flags: list[str]) -> list[str]:
    """Removes the flags for prompts and user functions, as on a machine with only the model and the dumps."""
    gone = ("--prompt-data", "--custom-rm-path", "--rollout-sample-hook-path")
    return [word for i, word in enumerate(flags) if word not in gone and flags[i - 1] not in gone]


def test_offload_alternates_engine_and_trainer_phases(place: Path, dumped: Path) -> None:
    """On a CPU no memory is released, but the order of the phases is the same as on a GPU."""
    rows = [json.loads(line) for line in (place / "dumping/memory.jsonl").read_text().splitlines()]
    phases = [phase for phase, _ in groupby(row["phase"] for row in rows)]
    step = ["sleep", "rollout", "release", "train", "publish"]
    assert phases == ["start", "publish", *step, *step]
    assert all(row["host"] > 0 for row in rows)
    assert (place / "dumping/memory.png").stat().st_size > 0
    for record in records(place / "dumping", "rollout"):
        switches = ("sleep", "release", "wake", "resume_weights")
        assert record["perf/switch_time"] >= sum(record[f"perf/switch_{name}_time"] for name in switches)
        assert record["perf/host_memory_train_peak_gib"] > 0


def test_training_on_dumps_reproduces_the_run_exactly(place: Path, dumped: Path) -> None:
    found = losses_and_grad_norms(place / "dumping")
    assert len(found) == 4
    for suffix in ("jsonl", "pt"):
        if suffix == "pt":
            for rollout_id in (0, 1):
                config = load_config(place / "dumping/config.yaml")
                groups = read_dump(dumped / f"{rollout_id}.jsonl")
                write_dump(dumped / f"{rollout_id}.pt", rollout_id, leaves(groups), config)
        flags = [*without_prompts(grpo_flags()), "--load-debug-rollout-data", f"dumps/{{rollout_id}}.{suffix}"]
        done = run([*TRAIN, *flags, "--output-dir", f"replay_{suffix}"], place)
        assert (done.code, done.err) == (0, "")
        assert losses_and_grad_norms(place / f"replay_{suffix}") == found
        assert not list((place / f"replay_{suffix}/logs").glob("engine*"))
    original = [record["rollout/raw_reward"] for record in records(place / "dumping", "rollout")]
    assert [record["rollout/raw_reward"] for record in records(place / "replay_pt", "rollout")] == original


def test_rollout_smaller_than_a_step_is_trained_with_the_next_one(place: Path, dumped: Path) -> None:
    flags = [*without_prompts(grpo_flags()), "--load-debug-rollout-data", "dumps/{rollout_id}.jsonl"]
    done = run([*TRAIN, *flags, "--load-debug-rollout-data-subsample", "0.25", "--output-dir", "share"], place)
    assert done.code == 0
    assert "rollout 0 is not trained on yet: 4 rollouts are waiting" in done.err
    assert [record["kind"] for record in records(place / "share")] == ["rollout", "train", "rollout"]
    (step,) = records(place / "share", "train")
    assert (step["rollout_id"], step["train/global_batch_size"]) == (1, 8)  # four rollouts from each dump


def test_rollout_only_mode_with_teacher_evaluation_and_log_functions(place: Path) -> None:
    make_model_folder(place / "teacher", seed=5, intermediate_size=128)
    (place / "logs.py").write_text(LOGS)
    (place / "eval.yaml").write_text(
        "eval: {datasets: {few: {path: 'sums.jsonl@[0:3]', temperature: 0, n_samples_per_eval_prompt: 2}}}\n"
    )
    flags = [
        *grpo_flags(),
        *("--num-rollout", "2", "--debug-rollout-only", "--rollout-temperature", "1"),
        *("--use-opd", "--opd-type", "engine", "--opd-teacher-load", "teacher"),
        *("--eval-config", "eval.yaml", "--eval-interval", "2", "--skip-eval-before-train"),
        *("--custom-rollout-log-function-path", "logs.py:rollout"),
        *("--custom-eval-rollout-log-function-path", "logs.py:evaluation"),
        *("--log-passrate", "--save-debug-rollout-data", "alone/{rollout_id}.jsonl", "--output-dir", "alone"),
    ]
    done = run([*TRAIN, *flags], place)
    assert (done.code, done.err) == (0, "")
    assert sorted(path.name for path in (place / "alone/logs").iterdir()) == [
        "driver.log",
        "engine-0.log",
        "teacher-0.log",
    ]
    first, second = records(place / "alone", "rollout")
    assert "passrate/pass@4" in first
    assert "rollout/raw_reward" not in second  # logged by the user's function
    assert "perf/step_time" in second
    assert records(place / "alone", "eval") == []
    logged = [json.loads(line) for line in (place / "logged.jsonl").read_text().splitlines()]
    assert [row[0] for row in logged] == [0, 1, "eval 2"]
    assert logged[0][1:] == [16, first["rollout/raw_reward"], True]
    assert logged[2][1] == ["few"]

    samples = list(leaves(read_dump(place / "alone/0.jsonl")))
    assert [sample.index for sample in samples] == list(range(16))
    teacher = AutoModelForCausalLM.from_pretrained(place / "teacher").float()
    with torch.no_grad():
        for sample in samples[:4]:
            tokens = torch.tensor([sample.tokens])
            log_probs = teacher(tokens).logits.log_softmax(-1)[0, sample.prompt_length - 1 : -1]
            expected = log_probs.gather(1, tokens[0, sample.prompt_length :, None])[:, 0].tolist()
            assert sample.teacher_log_probs == pytest.approx(expected, abs=2e-4)
    evaluated = list(leaves(read_dump(place / "alone/eval_2.jsonl")))
    assert [sample.eval_dataset for sample in evaluated] == ["few"] * 6
    assert [evaluated[i].tokens for i in (0, 2, 4)] == [evaluated[i].tokens for i in (1, 3, 5)]  # greedy


def test_partial_rollouts_lose_no_prompt(place: Path) -> None:
    """Over-sampling with partial rollouts and a real engine: every prompt is in a batch or waits in the journal."""
    (place / "uneven.py").write_text(UNEVEN)
    flags = [
        *grpo_flags(),
        *("--num-rollout", "2", "--custom-generate-function-path", "uneven.py:generate"),
        *("--over-sampling-batch-size", "7", "--partial-rollout", "--mask-offpolicy-in-partial-rollout"),
        *("--save", "cut", "--save-debug-rollout-data", "cut/dump_{rollout_id}.jsonl"),
    ]
    done = run([*TRAIN, *flags], place)
    assert (done.code, done.err) == (0, "")
    first, second = ([*leaves(read_dump(place / f"cut/dump_{i}.jsonl"))] for i in (0, 1))
    assert sorted({sample.group_index for sample in first}) == [0, 2, 4, 6]
    assert records(place / "cut", "rollout")[0]["rollout/held_groups"] == 3
    assert [record["rollout/thrown_away_tokens"] for record in records(place / "cut", "rollout")] == [0.0, 0.0]

    state = json.loads((place / "cut/rollout/data_state_1.json").read_text())
    unconsumed = "SELECT sample_index FROM trajectories WHERE state != 'consumed'"
    with sqlite3.connect(place / "cut/journal.sqlite") as journal:
        waiting = [index for (index,) in journal.execute(unconsumed)]
    everything = sorted([sample.index for sample in [*first, *second]] + waiting)
    assert everything == list(range(state["sample_index"]))

    continued = [sample for sample in second if sample.metadata.get("start_rollout_id") == 0]
    assert len(continued) in (4, 8, 12)  # the long groups that finished before short new ones
    for sample in continued:
        before = sample.loss_mask.index(1)
        assert 0 < before < sample.response_length == 200
        assert sample.loss_mask == [0] * before + [1] * (200 - before)
        assert len(sample.rollout_log_probs) == 200
        assert sample.weight_versions == ["0", "1"]
    steps = [record for record in records(place / "cut", "train") if record["rollout_id"] == 1]
    assert (
        steps[0]["train/train_rollout_logprob_abs_diff_max"] <= 1e-4
    )  # trained tokens were sampled with the current weights


def test_eval_command_starts_only_an_engine(place: Path) -> None:
    keys = ["--input-key", "messages", "--label-key", "label", "--apply-chat-template"]
    flags = ["--hf-checkpoint", "model", "--device", "cpu", "--rm-type", "math", *keys, *eval_flags()]
    done = run([sys.executable, "-m", "slime.cli", "eval", *flags, "--output-dir", "only_eval"], place)
    assert (done.code, done.err) == (0, "")
    assert sorted(path.name for path in (place / "only_eval/logs").iterdir()) == ["driver.log", "engine-0.log"]
    (record,) = records(place / "only_eval")
    assert (record["kind"], record["step"]) == ("eval", 0)
    assert {"eval/first", "eval/last"} <= set(record)


def test_train_only_mode_starts_no_engine(place: Path) -> None:
    flags = [
        *("--hf-checkpoint", "model", "--prompt-data", "sums.jsonl", "--input-key", "messages", "--label-key", "label"),
        *("--loss-type", "sft_loss", "--rollout-batch-size", "4", "--num-rollout", "1", "--device", "cpu"),
        *("--debug-train-only", *eval_flags(), "--output-dir", "sft_only"),
    ]
    done = run([*TRAIN, *flags], place)
    assert (done.code, done.err) == (0, "")
    assert [record["kind"] for record in records(place / "sft_only")] == ["train", "rollout"]
    assert sorted(path.name for path in (place / "sft_only/logs").iterdir()) == ["driver.log", "trainer-0.log"]
