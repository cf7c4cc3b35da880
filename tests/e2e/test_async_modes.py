"""Whole runs in every asynchronous mode: weight versions of samples, consumed samples, evaluation and filters."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import slime
from slime.data.sample import Sample
from slime.rollout.pipeline import OneStepAheadFeed
from tests.e2e.conftest import eval_flags, grpo_flags
from tests.e2e.runs import ROOT, run, seen_samples
from tests.rows import some
from tests.tiny_models import make_model_folder

TRAIN_ASYNC = (sys.executable, str(ROOT / "train_async.py"))
ROLLOUTS, PROMPTS, SAMPLES = 6, 4, 4
DEDICATED = ["--rollout-num-gpus", "1"]


def test_train_async_samples_with_weights_one_step_behind(place: Path) -> None:
    flags = [*grpo_flags(), *eval_flags(), "--num-rollout", "4", "--output-dir", "ahead"]
    done = run([*TRAIN_ASYNC, *flags], place)
    assert (done.code, done.err) == (0, "")
    samples = seen_samples(place / "ahead")
    for rollout_id in range(4):
        own = [sample for sample in samples if not sample["evaluation"] and sample["rollout_id"] == rollout_id]
        assert sorted(sample["index"] for sample in own) == list(range(16 * rollout_id, 16 * rollout_id + 16))
        # generated during training on the previous rollout, which produces the next version
        assert {tuple(sample["weight_versions"]) for sample in own} == {(str(max(0, rollout_id - 1)),)}
    for step in (0, 2, 4):
        evaluated = [s for s in samples if s["evaluation"] and s["rollout_id"] == step]
        assert {tuple(sample["weight_versions"]) for sample in evaluated} == {(str(step),)}


def test_rejects_offload_rollout_in_async_mode(place: Path) -> None:
    done = run([*TRAIN_ASYNC, *grpo_flags(), "--num-rollout", "1", "--colocate", "--offload-rollout"], place)
    assert done.code == 2
    assert "--offload-rollout frees the engines' memory during training" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("modes") / "model")


def by_index(args: Any, sample: Sample) -> float:
    assert sample.index is not None
    return float(sample.index % 2)


def train(folder: Path, out: Path, reward: Callable[..., float] = by_index, **flags: Any) -> Any:
    out.mkdir(parents=True, exist_ok=True)
    prompts = out / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"what is {i}+{i}?"}) + "\n" for i in range(64)))
    settings: dict[str, Any] = {
        "hf_checkpoint": str(folder), "prompt_data": str(prompts), "num_rollout": ROLLOUTS,
        "rollout_batch_size": PROMPTS, "n_samples_per_prompt": SAMPLES, "rollout_max_response_len": 24,
        "use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096, "lr": 1e-3, "progress": "none",
        "keep_samples": True, "output_dir": str(out / "run"),
    }  # fmt: skip
    return slime.run(reward=reward, **(settings | flags))


def consumed(out: Path) -> list[tuple[int, int]]:
    """Returns (rollout that trained on it, index) of every consumed sample, read with plain SQLite."""
    with sqlite3.connect(f"file:{out / 'run' / 'journal.sqlite'}?mode=ro", uri=True) as journal:
        rows = journal.execute(
            "SELECT g.consumed_by, s.sample_index FROM samples s JOIN groups g ON s.group_id = g.id "
            "WHERE g.state = 'consumed' ORDER BY s.sample_index"
        )
        return [(int(rollout), int(index)) for rollout, index in rows]


MODES: dict[str, dict[str, Any]] = {
    "partial": {"over_sampling_batch_size": 8, "partial_rollout": True},
    "one-step": {"async_mode": "one-step", "async_buffer_size": 2, "update_weights_interval": 2},
    "full": {"async_mode": "full", "max_weight_staleness": 1},
    "full, weights by abort": {"async_mode": "full", "update_weight_pause_mode": "retract", "use_tis": True},
}


@pytest.mark.parametrize("mode", some(["partial", "full"], of=MODES))
def test_every_mode_trains_each_sample_once(mode: str, folder: Path, tmp_path: Path) -> None:
    result = train(folder, tmp_path, **MODES[mode])
    assert len(result.metrics) == ROLLOUTS
    trained = consumed(tmp_path)
    per_rollout = PROMPTS * SAMPLES
    assert len({index for _, index in trained}) == len(trained) == ROLLOUTS * per_rollout
    assert [rollout for rollout, _ in sorted(trained)] == [r for r in range(ROLLOUTS) for _ in range(per_rollout)]
    for metrics in result.metrics:
        assert metrics["rollout/raw_reward"] == 0.5
        assert metrics.get("rollout/thrown_away_tokens", 0.0) == 0.0
        assert metrics["rollout/failed/count"] == 0.0
    if mode == "one-step":  # weights are published every second step, and two rollouts are buffered
        assert max(metrics["rollout/staleness/max"] for metrics in result.metrics) <= 3.0
        assert [metrics["rollout/staleness/max"] for metrics in result.metrics][:2] == [0.0, 1.0]
    if mode == "full":
        oldest = [metrics["rollout/staleness/max"] for metrics in result.metrics]
        assert max(oldest) == 1.0
        assert oldest[0] == 0.0


def test_evaluation_precedes_rollouts_with_the_same_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rollout ends only once the driver waits for it, so the buffer always has room for the next one."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"input": "held out"}) + "\n")
    scored: list[tuple[str, str]] = []
    waited_for, changed = [0], threading.Condition()
    undisturbed = OneStepAheadFeed.undisturbed

    def counted(feed: OneStepAheadFeed) -> Any:
        with changed:
            waited_for[0] += 1
            changed.notify_all()
        return undisturbed(feed)

    def reward(args: Any, sample: Sample) -> float:
        assert sample.index is not None
        kind = "evaluation" if "held out" in str(sample.prompt) else "rollout"
        if kind == "rollout":
            with changed:
                assert changed.wait_for(lambda: waited_for[0] >= sample.index // (PROMPTS * SAMPLES), 60)
        scored.append((kind, str(sample.weight_versions[-1])))
        return float(sample.index % 2)

    monkeypatch.setattr(OneStepAheadFeed, "undisturbed", counted)

    flags = {"eval_prompt_data": [("held-out", str(held_out))], "eval_interval": 2, "num_rollout": 5}
    train(folder, tmp_path, reward, async_mode="one-step", async_buffer_size=2, **flags)
    for version in ("2", "4"):
        of_version = [kind for kind, sampled in scored if sampled == version]
        assert of_version[0] == "evaluation"
    assert ("rollout", "2") in scored


def test_evaluation_and_filters_work_in_full_async_mode(folder: Path, tmp_path: Path) -> None:
    filter_path = tmp_path / "odd.py"
    filter_path.write_text("def f(args, samples):\n    return samples[0].group_index % 3 != 2\n")
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"input": "what is 9+9?"}) + "\n")
    result = train(
        folder,
        tmp_path,
        async_mode="full",
        dynamic_sampling_filter_path=f"{filter_path}:f",
        eval_prompt_data=[("held-out", str(held_out))],
        eval_interval=2,
        save_debug_rollout_data=str(tmp_path / "dump_{rollout_id}.jsonl"),
    )
    assert [step for step, _ in result.evaluations] == [0, 2, 4, 6]
    dropped = sum(metrics.get("rollout/dynamic_filter/drop_unnamed", 0.0) for metrics in result.metrics)
    assert dropped >= ROLLOUTS * PROMPTS / 2 - 4  # every third group
    trained = {index // SAMPLES for _, index in consumed(tmp_path)}
    assert len(trained) == ROLLOUTS * PROMPTS
    assert all(group % 3 != 2 for group in trained)
