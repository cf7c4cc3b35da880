"""User functions in a real run: rewards that raise, and a two-turn generate function started from Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

import pytest

from tests.e2e.conftest import grpo_flags
from tests.e2e.runs import ROOT, TRAIN, records, run, seen_samples

NOTEBOOK = """\
import json
import sys

sys.path.insert(0, {root!r})
import slime


def even_tokens(args, sample):
    return fraction(token % 2 == 0 for token in sample.tokens)


def fraction(flags):
    flags = list(flags)
    return sum(flags) / len(flags)


result = slime.run(
    hf_checkpoint="model", prompt_data="sums.jsonl", input_key="messages", label_key="label", apply_chat_template=True,
    reward=even_tokens, custom_generate_function_path="plugins.py:two_turns",
    rollout_sample_hook_path=["plugins.py:note"], rollout_sample_filter_path="plugins.py:note_places",
    rollout_batch_size=4, n_samples_per_prompt=4, num_rollout=2,
    rollout_max_response_len=64, rollout_num_gpus=2, lr=1e-3, device="cpu", output_dir="notebook", progress="none",
)
print(json.dumps([str(result.run_dir), [m["rollout/raw_reward"] for m in result.metrics]]))
"""


def test_failed_rewards_end_the_run_only_if_all_samples_fail(place: Path) -> None:
    flags = [*grpo_flags(), "--custom-rm-path", "plugins.py:partly_broken", "--num-rollout", "4"]
    done = run([*TRAIN, *flags, "--output-dir", "raising"], place)
    assert done.code == 1
    assert "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert last == (
        "error: rollout 2: all 16 samples failed; the first one: reward: ValueError: no verdict on sample 32"
    )
    found = records(place / "raising", "rollout")
    assert [record["rollout_id"] for record in found] == [0, 1]
    for record in found:
        assert record["rollout/failed/count"] == record["rollout/failed/reward"] == 4
        assert record["rollout/excluded_samples"] == 4
        assert record["rollout/raw_reward"] == pytest.approx(2 / 3)  # of each four one failed, the others got 1, 0, 1
    log = (place / "raising/logs/driver.log").read_text()
    assert log.count('raise ValueError(f"no verdict on sample') == 1


@pytest.mark.long
def test_two_turn_generate_function_runs_from_python(place: Path) -> None:
    (place / "notebook.py").write_text(NOTEBOOK.format(root=str(ROOT)))
    done = run([sys.executable, "notebook.py"], place)
    assert done.code == 0
    said = [line.split(";")[0] for line in done.err.splitlines()]  # warnings appear without a progress display
    assert said == [f"WARNING: rollout {n}: 16 of 16 responses were cut off at the length limit" for n in (0, 1)]
    run_dir, rewards = json.loads(done.out.splitlines()[-1])
    samples = seen_samples(place / run_dir)
    assert len(samples) == 32
    kept = [json.loads(line) for line in (place / run_dir / "kept.jsonl").read_text().splitlines()]
    assert kept == [[True] * 16] * 2  # stored where the trainers read them, before the step
    tool = len(samples[0]["loss_mask"]) - 8
    assert tool > 0
    for sample in samples:
        assert sample["loss_mask"] == [1] * 4 + [0] * tool + [1] * 4
        assert sample["response"].count(" the answer is 46. ") >= 1
        assert sample["weight_versions"] == [str(sample["index"] // 16)] * 2
        assert all(value == 0 for value in sample["rollout_log_probs"][4:-4])
    for record in records(place / run_dir, "train"):
        assert record["train/train_rollout_logprob_abs_diff_max"] <= 1e-4  # tool tokens are not compared
    for record, reward in zip(records(place / run_dir, "rollout"), rewards, strict=True):
        own = [sample for sample in samples if sample["index"] // 16 == record["rollout_id"]]
        assert record["rollout/response_len/mean"] == 8
        assert record["rollout/response_lengths"] == 8 + tool
        sampled = fmean(sum(sample["rollout_log_probs"]) / 8 for sample in own)
        assert record["rollout/log_probs"] == pytest.approx(sampled, abs=1e-4)
        assert reward == pytest.approx(fmean(fmean(token % 2 == 0 for token in s["tokens"]) for s in own))
