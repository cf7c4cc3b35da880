"""Data sources, rollout files and teachers written for upstream slime, each in whole runs."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.rollout.debug_data import read_dump
from tests.e2e.conftest import grpo_flags
from tests.e2e.runs import ROOT, TRAIN, Done, assert_same_records, comparable, records, run
from tests.engine.conftest import EngineProcess
from tests.tiny_models import make_model_folder

PLUGINS = Path(__file__).parent / "plugins"
REWARDS = """\
async def token_sum(args, sample, **kwargs):
    return sum(sample.tokens) % 7 / 7
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's working folder: a model, sums as prompts, and the plugin files."""
    folder = tmp_path_factory.mktemp("upstream")
    make_model_folder(folder / "model")
    sums = [
        {"messages": [{"role": "user", "content": f"what is {i}+{i + 1}?"}], "label": str((5 * i) % 12)}
        for i in range(12)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "rewards.py").write_text(REWARDS)
    for file in PLUGINS.glob("*.py"):
        shutil.copy(file, folder)
    return folder


def flags_without(*left_out: str) -> list[str]:
    """Flags of a small run without the given flags and their values."""
    replaced = {"plugins.py:token_sum": "rewards.token_sum"}
    flags = [replaced.get(word, word) for word in grpo_flags()]
    gone = ("--rollout-sample-hook-path", *left_out)
    return [
        word
        for i, word in enumerate(flags)
        if word not in gone and not (flags[i - 1] in gone and not word.startswith("--"))
    ]


def run_training(place: Path, *words: str, left_out: tuple[str, ...] = (), program: tuple[str, ...] = TRAIN) -> Done:
    done = run([*program, *flags_without(*left_out), *words], place)
    assert done.code == 0, done.err
    return done


def batch(place: Path, out: str, rollout_id: int) -> list[Sample]:
    """Samples of a rollout in training order."""
    return [sample for group in read_dump(place / out / f"{rollout_id}.jsonl") for sample in group]


def group_states(place: Path, out: str) -> dict[str, int]:
    """Number of journal groups in each state."""
    with closing(sqlite3.connect(place / out / "journal.sqlite")) as journal:
        return dict(journal.execute("SELECT state, count(*) FROM groups GROUP BY state"))


def count_handed_out_groups(place: Path, out: str) -> int:
    """Number of groups that the data source handed out; returned groups count once."""
    with closing(sqlite3.connect(place / out / "journal.sqlite")) as journal:
        ((position,),) = journal.execute("SELECT value FROM meta WHERE key = 'position'")
    return int(json.loads(position)["sample_group_index"])


def output_flags(out: str, *, steps: int = 1) -> list[str]:
    dump = f"{out}/{{rollout_id}}.jsonl"
    return ["--num-rollout", str(steps), "--output-dir", out, "--save-debug-rollout-data", dump]


def test_subclassed_data_source_resumes_at_the_saved_position(place: Path) -> None:
    words = ["--data-source-path", "curriculum.EasyFirst", "--save", "easy", "--load", "easy"]
    run_training(place, *words, *output_flags("easy"), left_out=("--rollout-shuffle",))
    run_training(place, *words, *output_flags("easy", steps=2), left_out=("--rollout-shuffle",))
    seen: list[Any] = [
        [(sample.label, sample.metadata["level"]) for sample in batch(place, "easy", rollout_id)[::4]]
        for rollout_id in (0, 1)
    ]
    assert seen == [[(str(n), n) for n in range(4)], [(str(n), n) for n in range(4, 8)]]
    assert group_states(place, "easy") == {"consumed": 8}


def test_data_source_on_the_base_class_supplies_the_prompts(place: Path) -> None:
    words = ["--data-source-path", "curriculum.Counting", *output_flags("counting")]
    run_training(place, *words, left_out=("--prompt-data", "--apply-chat-template", "--rollout-shuffle"))
    assert [sample.prompt for sample in batch(place, "counting", 0)[::4]] == [f"count from {n}" for n in range(4)]


# rollout files derived from the default one

EVAL = ("--eval-prompt-data", "sums", "sums.jsonl@[0:3]", "--eval-interval", "1", "--n-samples-per-eval-prompt", "2")
FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
HALF = """\
async def half_flat(args, sample, **kwargs):
    return 1.0 if (sample.group_index or 0) % 2 else sum(sample.tokens) % 7 / 7
"""
CUT = (
    "--over-sampling-batch-size",
    "12",
    "--sglang-server-concurrency",
    "6",
    "--partial-rollout",
    "--rollout-max-response-len",
    "48",
)


@pytest.mark.parametrize("file", ["copied_rollout", "edited_rollout"])
def test_rollout_file_with_its_own_loop_loses_no_group(place: Path, file: str) -> None:
    (place / "half.py").write_text(HALF)
    words = [*("--rollout-function-path", f"{file}.generate_rollout", "--custom-rm-path", "half.half_flat")]
    words += ["--dynamic-sampling-filter-path", FILTER, *CUT, *EVAL, "--keep-samples", *output_flags(file, steps=2)]
    done = run_training(place, *words, left_out=("--custom-rm-path",))
    assert done.err == ""
    for rollout_id in (0, 1):
        samples = batch(place, file, rollout_id)
        assert len(samples) == len({sample.index for sample in samples}) == 16
        assert all(sample.group_index is not None and sample.group_index % 2 == 0 for sample in samples)
        assert all(sample.reward is not None for sample in samples)
    again = [sample for sample in batch(place, file, 1) if sample.index is not None and sample.index < 48]
    assert again, "what the first rollout had too much of did not come again"
    states = group_states(place, file)
    assert states["consumed"] == 8
    assert states["dropped"] >= 2
    assert sum(states.values()) == count_handed_out_groups(place, file), "a group that was handed out is nowhere"
    found = records(place / file, "rollout")
    assert all(record["rollout/dynamic_filter/drop_zero_std_1.0"] >= 1 for record in found)
    assert all(record["rollout/raw_reward"] < 1 for record in found)
    assert [record["step"] for record in records(place / file, "eval")] == [0, 1, 2]


def test_rollout_function_wraps_the_default_one(place: Path) -> None:
    run_training(place, "--rollout-function-path", "wrapping_rollout.generate_rollout", *EVAL, *output_flags("wrapped"))
    (record,) = records(place / "wrapped", "rollout")
    assert record["rollout/longest"] == max(sample.response_length for sample in batch(place, "wrapped", 0))
    assert record["rollout/response_lengths"] > 0
    assert len(records(place / "wrapped", "eval")) == 2


# generation during training

ASYNC = (sys.executable, str(ROOT / "train_async.py"))


def test_copied_fully_async_file_trains_on_each_sample_once(place: Path) -> None:
    words = ["--rollout-function-path", "copied_fully_async.generate_rollout_fully_async", "--keep-samples"]
    done = run_training(place, *words, *output_flags("worker", steps=3), program=ASYNC)
    assert done.err == ""
    seen = [{sample.index for sample in batch(place, "worker", rollout_id)} for rollout_id in range(3)]
    assert [len(indices) for indices in seen] == [16, 16, 16]
    assert len(set().union(*seen)) == 48
    states = group_states(place, "worker")
    assert states.pop("consumed") == 12
    assert sum(states.values()) == count_handed_out_groups(place, "worker") - 12


def test_rollout_function_wraps_the_fully_async_one(place: Path) -> None:
    words = ["--rollout-function-path", "wrapping_fully_async.generate_rollout", *EVAL]
    words += ["--custom-generate-function-path", "slime.rollout.sglang_streaming_rollout.generate_streaming"]
    done = run_training(place, *words, *output_flags("around", steps=3), program=ASYNC)
    assert done.err == ""
    seen = [{sample.index for sample in batch(place, "around", rollout_id)} for rollout_id in range(3)]
    assert len(set().union(*seen)) == 48
    found = records(place / "around", "rollout")
    assert all(record["rollout/staleness/max"] <= 2 for record in found)
    assert all("rollout/ready_groups" in record for record in found)
    assert [record["step"] for record in records(place / "around", "eval")][-1] == 3


# a teacher instead of a reward


@pytest.fixture(scope="module")
def teacher(place: Path) -> Iterator[str]:
    """URL of an engine that serves another model."""
    make_model_folder(place / "sage", seed=11)
    served = EngineProcess(place / "sage", place / "teacher.log", "--device", "cpu")
    yield served.url
    served.stop()


def test_distillation_by_function_paths_equals_distillation_by_flags(place: Path, teacher: str) -> None:
    by_flags = ["--use-opd", "--opd-type", "sglang", "--opd-kl-coef", "1.0", "--rm-url", f"{teacher}/generate"]
    runs = {"flags": []}
    for name, module in (("path", "slime.rollout.on_policy_distillation"), ("copy", "copied_distillation")):
        runs[name] = ["--custom-rm-path", f"{module}.reward_func"]
        runs[name] += ["--custom-reward-post-process-path", f"{module}.post_process_rewards"]
    trains, reverse_kls = [], []
    for name, words in runs.items():
        out = f"taught_{name}"
        left_out = ("--custom-rm-path", "--rollout-temperature")
        done = run_training(place, *by_flags, *words, *output_flags(out, steps=2), left_out=left_out)
        assert done.err == ""
        trains.append([record for record in comparable(place / out) if record["kind"] == "train"])
        reverse_kls.append([record["rollout/opd_reverse_kl"] for record in records(place / out, "rollout")])
        assert [record["rollout/raw_reward"] for record in records(place / out, "rollout")] == [0.0, 0.0]
    assert all(value != 0 for value in reverse_kls[0])
    for other, reverse_kl in zip(trains[1:], reverse_kls[1:], strict=True):
        assert_same_records(other, trains[0], 1e-5)
        assert reverse_kl == pytest.approx(reverse_kls[0], rel=1e-5)
