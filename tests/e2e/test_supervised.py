"""Supervised training, stopped and resumed with larger batches: no engine, no reward, continuous step counters."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.e2e.runs import TRAIN, records, run
from tests.small_disk import small_disk

FLAGS = [
    *("--hf-checkpoint", "model", "--prompt-data", "sums.jsonl", "--input-key", "messages", "--label-key", "label"),
    *("--loss-type", "sft_loss", "--rollout-batch-size", "4", "--lr", "1e-3", "--device", "cpu"),
    *("--save", "sft", "--load", "sft", "--ckpt-keep", "1"),
]


def test_supervised_run_resumes_with_continuous_step_counters(place: Path) -> None:
    first = run([*TRAIN, *FLAGS, "--num-rollout", "2", "--global-batch-size", "2", "--save-interval", "1"], place)
    assert (first.code, first.err) == (0, "")
    second = run([*TRAIN, *FLAGS, "--num-rollout", "3", "--global-batch-size", "4"], place)
    assert (second.code, second.err) == (0, "")

    for out in (first.out, second.out):
        assert not any(word in out for word in ("reward", "tok/s", "tokens/s", "engine"))
    steps = records(place / "sft", "train")
    assert [(r["step"], r["rollout_id"]) for r in steps] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]
    assert [r["train/step"] for r in steps] == [0, 1, 2, 3, 4]
    assert not any("reward" in name or "tokens_per" in name for r in records(place / "sft") for name in r)
    kept = [path.name for path in (place / "sft").glob("iter_*")] + [p.name for p in (place / "sft/rollout").iterdir()]
    assert kept == ["iter_0000002", "data_state_2.json"]


def test_full_disk_at_the_final_save_keeps_the_weights_elsewhere(place: Path) -> None:
    flags = [*FLAGS[: FLAGS.index("--save")], "--num-rollout", "1", "--output-dir", "rescued"]
    with small_disk(place / "small") as disk:
        done = run([*TRAIN, *flags, "--save", "small/ckpt", "--save-hf", "small/hf"], place)
        assert [path.name for path in disk.rglob("*") if path.is_file()] == ["data_state_0.json"]
    (kept,) = place.glob("rescued/rescued-*-rollout-0")
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert last.startswith("error: cannot write the checkpoint of rollout 0 to small/ckpt/iter_0000000: ")
    assert last.endswith(
        f"; the weights after rollout 0 are saved in {kept}, a Hugging Face folder, and a checkpoint to resume from "
        f"with --load {kept}-checkpoint"
    )
    assert "Traceback" not in done.err
    before, after = (load_file(folder / "model.safetensors") for folder in (place / "model", kept))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert (place / f"{kept}-checkpoint" / "iter_0000000" / "meta.json").is_file()
