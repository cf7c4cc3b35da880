"""One GRPO run with the flags of the documentation: output, logs, metrics, saved models, and equivalent runs."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.cli import main
from slime.config import Config, parse_args
from slime.errors import UserError
from slime.observability.metrics import read_metrics
from tests.e2e.conftest import eval_flags, grpo_flags
from tests.e2e.runs import TRAIN, Done, assert_same_records, comparable, records, run, seen_samples, snapshot
from tests.warm.popen import COLD

TEMPERATURE = 0.9
TRAIN_NAMES = {
    *("train/loss", "train/pg_loss", "train/entropy_loss", "train/kl_loss", "train/ppo_kl", "train/pg_clipfrac"),
    *("train/grad_norm", "train/lr-pg_0", "train/step", "train/global_batch_size"),
    *("train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max"),
}
ROLLOUT_NAMES = {
    *("rollout/raw_reward", "rollout/rewards", "rollout/advantages", "rollout/truncated_ratio", "rollout/failed/count"),
    *("rollout/log_probs", "rollout/ref_log_probs", "rollout/rollout_log_probs", "rollout/response_len/mean"),
    *("perf/rollout_time", "perf/train_time", "perf/actor_train_time", "perf/update_weights_time", "perf/step_time"),
    "perf/idle_time",
}


@pytest.fixture(scope="module")
def run_dir(whole_run: tuple[Path, Done]) -> Path:
    return whole_run[0]


@pytest.fixture(scope="module")
def training(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """The generated training samples of each rollout."""
    by_rollout = defaultdict(list)
    for sample in seen_samples(run_dir):
        if not sample["evaluation"]:
            by_rollout[sample["rollout_id"]].append(sample)
    return by_rollout


def test_output_and_logs_have_the_expected_lines(whole_run: tuple[Path, Done], place: Path) -> None:
    run_dir, done = whole_run
    assert done.err == ""
    event = re.compile(r"\[\d+:\d\d\] (trainer|engine|weights|rollout|eval|step|note|warning)\b")
    other = re.compile(r"checking the model and the prompts; the run's files go to whole$|Finished|[┌│└]")
    strange = [line for line in done.out.splitlines() if not event.match(line) and not other.match(line)]
    assert strange == []
    assert re.search(r"trainer: starting 1 process\(es\) on cpu in float32 \((a small|this CPU)", done.out)
    shown = [line.split()[2] for line in done.out.splitlines() if "] step " in line]
    assert (shown[0], shown[-1], shown) == ("1/4", "4/4", sorted(set(shown)))  # fast steps may be skipped
    logs = {path.name: path.read_text() for path in (run_dir / "logs").iterdir()}
    assert set(logs) == {"driver.log", "engine-0.log", "trainer-0.log"}
    dated = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|DEBUG|WARNING slime.progress:) ")
    assert [line for text in logs.values() for line in text.splitlines() if not dated.match(line)] == []
    driver = logs["driver.log"]
    assert [f"step {n}/4  reward" in driver for n in (1, 2, 3, 4)] == [True] * 4
    assert "eval before training: first" in driver
    cut = "rollout 0: 16 of 16 responses were cut off at the length limit; one response is "
    assert f"WARNING slime.progress: {cut}" in driver
    assert done.out.count(cut) == 1


def test_each_rollout_is_sampled_with_the_current_weights(training: dict[int, list[dict[str, Any]]]) -> None:
    assert sorted(training) == [0, 1, 2, 3]
    for rollout_id, samples in training.items():
        assert sorted(sample["index"] for sample in samples) == list(range(16 * rollout_id, 16 * rollout_id + 16))
        assert all(sample["weight_versions"] == [str(rollout_id)] for sample in samples)


def test_prompts_are_rendered_with_the_chat_template(training: dict[int, list[dict[str, Any]]], place: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    for samples in training.values():
        for sample in samples:
            first = (int(sample["label"]) - 1) // 2
            message = {"role": "user", "content": f"what is {first}+{first + 1}?"}
            rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
            expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
            assert sample["tokens"][: -sample["response_length"]] == expected


def test_train_and_rollout_records_match_the_samples(run_dir: Path, training: dict[int, list[dict[str, Any]]]) -> None:
    steps = records(run_dir, "train")
    assert [(r["step"], r["rollout_id"], r["train/step"]) for r in steps] == [(i, i // 2, float(i)) for i in range(8)]
    for step in steps:
        assert set(step) >= TRAIN_NAMES
        assert step["train/train_rollout_logprob_abs_diff_max"] <= 1e-4
        assert step["train/train_rollout_logprob_abs_diff"] <= 1e-4
        assert step["train/lr-pg_0"] == 1e-3
        assert step["train/global_batch_size"] == 8
        assert step["train/grad_norm"] > 0
    assert steps[0]["train/kl_loss"] == pytest.approx(0, abs=1e-6)  # the policy starts as its own reference
    assert steps[-1]["train/kl_loss"] > 1e-4
    for record in records(run_dir, "rollout"):
        samples = training[record["rollout_id"]]
        assert set(record) >= ROLLOUT_NAMES
        rewards = [sum(sample["tokens"]) % 7 / 7 for sample in samples]
        assert record["rollout/raw_reward"] == pytest.approx(fmean(rewards))
        assert record["rollout/rewards"] == pytest.approx(0, abs=1e-6)
        assert record["rollout/response_len/mean"] == fmean(sample["response_length"] for sample in samples)
        sampled = fmean(fmean(sample["rollout_log_probs"]) for sample in samples)
        assert record["rollout/rollout_log_probs"] == pytest.approx(sampled, abs=1e-5)
        assert record["rollout/log_probs"] == pytest.approx(sampled, abs=1e-4)


def test_evaluation_records_match_the_samples(run_dir: Path) -> None:
    found = records(run_dir, "eval")
    assert [record["step"] for record in found] == [0, 2, 4]
    for record in found:
        samples = [s for s in seen_samples(run_dir) if s["evaluation"] and s["rollout_id"] == record["step"]]
        assert {tuple(sample["weight_versions"]) for sample in samples} == {(str(record["step"]),)}
        for name, labels in (("first", {"1", "3", "5", "7"}), ("last", {"17", "19", "21", "23"})):
            own = [sample for sample in samples if sample["label"] in labels]
            assert len(own) == 8
            assert record[f"eval/{name}"] == pytest.approx(fmean(sum(s["tokens"]) % 7 / 7 for s in own))
            truncated = fmean(s["response_length"] == 6 and s["tokens"][-1] != 2 for s in own)
            assert record[f"eval/{name}-truncated_ratio"] == truncated
            assert {f"eval/{name}-pass@1", f"eval/{name}-pass@2", f"eval/{name}/response_len/mean"} <= set(record)


def test_tensorboard_matches_the_metrics_file(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    for kind, name in (("train", "train/loss"), ("rollout", "rollout/raw_reward"), ("eval", "eval/last")):
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        assert shown == [(record["step"], pytest.approx(record[name])) for record in records(run_dir, kind)]


def test_samples_command_shows_training_and_evaluation_samples(
    run_dir: Path, training: dict[int, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(run_dir), "--rollout", "3"]) == 0
    assert "16 of 16 shown; samples in the journal: 64 consumed" in capsys.readouterr().out
    assert main(["samples", str(run_dir), "--eval", "--step", "4", "--dataset", "last"]) == 0
    assert "8 of 8 shown" in capsys.readouterr().out
    tables = read_metrics(run_dir / "completions.jsonl")
    assert [(table["name"], table["step"]) for table in tables] == [
        ("eval/first", 0), ("eval/last", 0), ("rollout", 0), ("rollout", 1), ("eval/first", 2), ("eval/last", 2),
        ("rollout", 2), ("rollout", 3), ("eval/first", 4), ("eval/last", 4),
    ]  # fmt: skip
    labels = {sample["label"] for sample in training[3]}
    assert {row["label"] for row in tables[7]["rows"]} <= labels


def test_saved_model_equals_the_checkpoint_and_the_engine_weights(run_dir: Path) -> None:
    assert sorted(path.name for path in run_dir.glob("hf_*")) == ["hf_1", "hf_3"]
    model, report = AutoModelForCausalLM.from_pretrained(
        run_dir / "hf_3", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    checkpoint = {}
    for file in (run_dir / "iter_0000003").glob("model-*.safetensors"):
        checkpoint |= load_file(file)
    state = model.state_dict()
    assert set(checkpoint) == set(state)
    for name, tensor in checkpoint.items():
        assert torch.equal(tensor, state[name]), name
    last = [sample for sample in seen_samples(run_dir) if sample["weight_versions"] == ["4"]]
    assert len(last) == 16
    for sample in last:  # the engine's log-probs after the last update are those of the saved weights
        tokens, length = torch.tensor(sample["tokens"]), sample["response_length"]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, -length - 1 : -1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, tokens[-length:, None])[:, 0]
        assert torch.allclose(torch.tensor(sample["rollout_log_probs"]), expected, atol=1e-4)


def test_saved_config_reproduces_the_flags(run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (saved,) = run_dir.glob("config.*")
    with pytest.raises(UserError, match="--save whole holds the checkpoints of an earlier run"):
        parse_args(["--config", str(saved)])
    again = parse_args(["--config", str(saved), "--save", "again"])
    assert isinstance(again, Config)
    assert (again.num_rollout, again.global_batch_size, again.num_steps_per_rollout) == (4, 8, 2)
    assert again.eval_prompt_data == [("first", "sums.jsonl@[0:4]"), ("last", "sums.jsonl@[8:12]")]
    assert (again.lr, again.kl_loss_coef, again.eps_clip_high, again.seed) == (1e-3, 0.01, 0.28, 7)
    done = run([*TRAIN, "--config", str(saved), "--save", "again", "--lr", "2e-3", "--dry-run"], place)
    assert (done.code, done.err) == (0, "")
    assert "0.002 constant" in done.out


@pytest.mark.long
def test_cold_start_gives_the_same_records(whole_run: tuple[Path, Done], place: Path) -> None:
    """Every process does its own imports, in a working folder that contains a decoy package `slime`."""
    flags = [*grpo_flags(), *eval_flags(), "--num-rollout", "4", "--save", "cold", "--save-interval", "2"]
    done = run([*TRAIN, *flags, "--ci-test"], place, **{COLD: "1"})
    assert done.code == 0, done.err
    assert_same_records(comparable(place / "cold"), comparable(whole_run[0]), 1e-6)


def test_full_async_mode_with_staleness_0_equals_the_synchronous_run(whole_run: tuple[Path, Done], place: Path) -> None:
    whole, _ = whole_run
    flags = [*grpo_flags(), *eval_flags(), "--num-rollout", "4", "--save", "zero", "--save-interval", "2"]
    done = run([*TRAIN, *flags, "--async-mode", "full", "--max-weight-staleness", "0"], place)
    assert (done.code, done.err) == (0, "")
    assert_same_records(comparable(place / "zero"), comparable(whole), 1e-7)


def test_two_trainers_and_two_engines_match_one_and_one(whole_run: tuple[Path, Done], place: Path) -> None:
    processes = ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2", "--num-rollout", "2"]
    done = run([*TRAIN, *grpo_flags(), *processes, "--output-dir", "two"], place)
    assert (done.code, done.err) == (0, "")
    assert {path.name for path in (place / "two/logs").iterdir()} == {
        *("driver.log", "engine-0.log", "engine-1.log", "trainer-0.log", "trainer-1.log")
    }
    ones = {s["index"]: s for s in seen_samples(whole_run[0]) if not s["evaluation"]}
    twos = {s["index"]: s for s in seen_samples(place / "two")}
    assert sorted(twos) == list(range(32))
    assert all(twos[index]["tokens"] == ones[index]["tokens"] for index in twos)
    expected = [r for r in comparable(whole_run[0]) if r["kind"] != "eval" and r["rollout_id"] < 2]
    assert len(expected) == 6
    assert_same_records(comparable(place / "two"), expected, 1e-5)


def test_rejects_the_checkpoint_of_another_model(whole_run: tuple[Path, Done], place: Path) -> None:
    """The trainer rejects it. The files of the earlier run stay unchanged."""
    before = kept_files(whole_run[0])
    done = run(
        [
            *TRAIN,
            *grpo_flags(),
            "--num-rollout",
            "1",
            "--hf-checkpoint",
            "wider",
            "--load",
            "whole",
            "--output-dir",
            "another",
        ],
        place,
    )
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert done.err.startswith("error: --load whole/iter_0000003 holds a qwen3 model of ")
    assert "but --hf-checkpoint wider is a qwen3 model of " in done.err
    assert kept_files(whole_run[0]) == before


def kept_files(run_dir: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(run_dir).items() if not name.startswith(("logs/", ".lock"))}
