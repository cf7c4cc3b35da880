"""Plugin examples, several at once, in whole runs with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, TRAIN, records, run
from tests.tiny_models import make_model_folder

P = ROOT / "examples" / "plugins"
COMMON = [
    *("--hf-checkpoint", "model", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "2"),
    *("--rollout-max-response-len", "6", "--device", "cpu", "--lr", "1e-3"),
]
LIST_GENERATE = """
async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            response = f"the answer is {turn + sample.index}."
            conversation.append({"role": "assistant", "content": response})
            conversation.append({"role": "tool", "content": "again"})
        sample.response = response
        sample.reward = float(sample.index % 2)
    return samples
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    make_model_folder(folder / "model")
    rows = [{"messages": [{"role": "user", "content": f"what is {i}+{i}?"}], "label": str(2 * i)} for i in range(8)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.yaml").write_text("wanted_words: [the, answer, zebra]\n")
    (folder / "custom_generate.py").write_text(LIST_GENERATE)
    (folder / "own.py").write_text("def length_share(args, sample):\n    return sample.response_length / 6\n")
    return folder


def read_jsonl(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rollout_examples_work_together_in_one_run(place: Path) -> None:
    flags = [
        *("--prompt-data", "sums.jsonl", "--input-key", "messages", "--label-key", "label", "--apply-chat-template"),
        *("--custom-generate-function-path", f"{P}/multi_turn_generate.py", "--max-turns", "2"),
        *("--custom-rm-path", f"{P}/group_reward.py", "--group-rm"),
        *("--custom-reward-post-process-path", f"{P}/reward_post_process.py"),
        *("--rollout-sample-hook-path", f"{P}/sample_hook.py"),
        *("--dynamic-sampling-filter-path", f"{P}/dynamic_filter.py"),
        *("--rollout-sample-filter-path", f"{P}/sample_filter.py", "--buffer-filter-path", f"{P}/buffer_filter.py"),
        *("--rollout-all-samples-process-path", f"{P}/all_samples_process.py"),
        *("--custom-rollout-log-function-path", f"{P}/rollout_log.py"),
        *("--custom-eval-rollout-log-function-path", f"{P}/eval_log.py"),
        *("--rollout-function-path", f"{P}/rollout_function.py", "--eval-function-path", f"{P}/eval_function.py"),
        *("--eval-prompt-data", "lengths", "sums.jsonl", "--eval-interval", "1", "--output-dir", "many"),
    ]
    done = run([*TRAIN, *COMMON, *flags], place)
    assert done.code == 0, done.err
    steps = records(place / "many", "rollout")
    assert [record["rollout_id"] for record in steps] == [0, 1]
    assert all(record["rollout/retried"] in (0.0, 1.0) for record in steps)
    assert all(0.0 < record["rollout/raw_reward"] <= 1.0 for record in steps)  # 1 for the longest of each group
    evaluations = records(place / "many", "eval")
    assert [record["step"] for record in evaluations] == [0, 1, 2]
    own = read_jsonl(place / "many" / "evaluations.jsonl")
    for record, line in zip(evaluations, own, strict=True):
        assert 1.0 <= record["eval/lengths"] <= line["best"]["lengths"] <= 6.0
    assert [line["samples"] for line in read_jsonl(place / "many" / "rollouts.jsonl")] == [4, 4]
    retries = sum(int(record["rollout/retried"]) for record in steps)
    seen = read_jsonl(place / "many" / "all_samples.jsonl")
    assert len(seen) == 4 * (2 + retries)
    assert all(str(line["response"]).count(" Are you sure? ") == 1 for line in seen)
    assert [record["rollout_id"] for record in records(place / "many", "train")] == [0, 1]


def test_data_source_fan_out_and_class_reward_examples_in_one_run(place: Path) -> None:
    flags = [
        *("--data-source-path", f"{P}/data_source.py", "--custom-generate-function-path", f"{P}/fan_out_generate.py"),
        *("--custom-rm-path", f"{P}/class_reward.py", "--custom-config-path", "mine.yaml"),
        *("--rollout-all-samples-process-path", f"{P}/all_samples_process.py", "--output-dir", "own"),
    ]
    done = run([*TRAIN, *COMMON, *flags], place)
    assert done.code == 0, done.err
    seen = read_jsonl(place / "own" / "all_samples.jsonl")
    assert [line["index"] for line in seen] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    words = ("the", "answer", "zebra")
    assert all(line["reward"] == sum(word in str(line["response"]) for word in words) / 3 for line in seen)
    assert [record["rollout_id"] for record in records(place / "own", "train")] == [0, 1]


def test_list_generate_function_that_sets_only_text_is_trained_on(place: Path) -> None:
    flags = [
        *("--prompt-data", "sums.jsonl", "--input-key", "messages", "--custom-generate-function-path"),
        *("custom_generate.py", "--max-turns", "2", "--output-dir", "listed"),
        *("--rollout-all-samples-process-path", f"{P}/all_samples_process.py"),
    ]
    done = run([*TRAIN, *COMMON, *flags], place)
    assert done.code == 0, done.err
    seen = read_jsonl(place / "listed" / "all_samples.jsonl")
    assert [(line["response"], line["reward"]) for line in seen] == [
        (f"the answer is {i + 1}.", float(i % 2)) for i in range(8)
    ]
    trained = records(place / "listed", "train")
    assert [record["rollout_id"] for record in trained] == [0, 1]
    assert all(record["train/grad_norm"] > 0 for record in trained)


def test_training_examples_work_together_in_one_run(place: Path) -> None:
    flags = [
        *("--prompt-data", "sums.jsonl", "--input-key", "messages", "--label-key", "label", "--apply-chat-template"),
        *("--custom-rm-path", "own.py:length_share", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1"),
        *("--custom-convert-samples-to-train-data-path", f"{P}/convert_samples.py"),
        *("--custom-advantage-function-path", f"{P}/advantage.py"),
        *("--rollout-data-postprocess-path", f"{P}/data_postprocess.py"),
        *("--use-tis", "--custom-tis-function-path", f"{P}/tis.py"),
        *("--custom-pg-loss-reducer-function-path", f"{P}/pg_loss_reducer.py", "--output-dir", "training"),
    ]
    done = run([*TRAIN, *COMMON, *flags], place)
    assert done.code == 0, done.err
    for record in records(place / "training", "train"):
        assert record["train/own_ratio"] == pytest.approx(1.0, abs=1e-3)
        assert record["train/grad_norm"] > 0
    for record in records(place / "training", "rollout"):
        assert record["rollout/raw_reward"] == pytest.approx(record["rollout/rewards"])  # not normalized
        assert 0 < record["rollout/advantages"] <= record["rollout/returns"] <= 1.0


def test_custom_loss_example_is_the_training_loss(place: Path) -> None:
    flags = [
        *("--prompt-data", "sums.jsonl", "--input-key", "messages", "--label-key", "label", "--apply-chat-template"),
        *("--custom-rm-path", "own.py:length_share", "--disable-rewards-normalization", "--output-dir", "loss"),
        *("--loss-type", "custom_loss", "--custom-loss-function-path", f"{P}/loss.py"),
    ]
    done = run([*TRAIN, *COMMON, *flags], place)
    assert done.code == 0, done.err
    for record in records(place / "loss", "train"):
        assert record["train/reinforce_loss"] == record["train/loss"] > 0
