"""Dataset mixtures: shares that hold after every prompt, epochs per dataset, and exact resumption."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import Config
from slime.config.plugins.view import plugin_args
from slime.data.buffer import JournaledSource, run_identity
from slime.data.mixture import next_dataset_index
from slime.data.prompt_rows import BY_RM_TYPE
from slime.data.sample import Sample
from slime.data.source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.errors import UserError
from tests.data.journal_samples import finish, open_journal

SIZES = {"copy": 5, "sort": 3, "add": 7}
WEIGHTS = {"copy": 2, "sort": 1, "add": 1}
Make = Callable[..., Any]


@pytest.fixture
def make_args(write_jsonl: Callable[..., str], model_folder: Path, tmp_path: Path) -> Make:
    """Build the `args` of a source over three datasets; `more` adds entries to single datasets."""

    def make(
        *,
        sizes: dict[str, int] = SIZES,
        weights: dict[str, float] = WEIGHTS,
        more: dict[str, dict[str, Any]] | None = None,
        **flags: Any,
    ) -> Any:
        datasets = [
            {
                "name": name,
                "path": write_jsonl([{"input": f"{name} {i}", "answer": i} for i in range(size)], f"{name}.jsonl"),
                "weight": weights[name],
                **(more or {}).get(name, {}),
            }
            for name, size in sizes.items()
        ]
        file = tmp_path / "tasks.json"
        file.write_text(json.dumps({"train": {"defaults": {"label_key": "answer"}, "datasets": datasets}}))
        usual = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "save": str(tmp_path), "load": str(tmp_path)}
        return plugin_args(Config(hf_checkpoint=str(model_folder), prompt_config=str(file), **{**usual, **flags}))

    return make


def tasks(groups: list[Any]) -> list[str]:
    return [group[0].task for group in groups]


def prompts(groups: list[Any]) -> list[str]:
    return [group[0].prompt for group in groups]


# shares


@settings(deadline=None)
@given(
    weights=st.lists(st.fractions(Fraction(1, 1000), 1000, max_denominator=1000), min_size=1, max_size=8),
    count=st.integers(1, 150),
)
def test_counts_stay_within_one_prompt_of_their_shares(weights: list[Fraction], count: int) -> None:
    counts, total = [0] * len(weights), sum(weights)
    for place in range(1, count + 1):
        counts[next_dataset_index(weights, counts)] += 1
        exact = [place * weight / total for weight in weights]
        assert all(abs(share - given) < 1 for share, given in zip(exact, counts, strict=True)), (place, counts)


def test_whole_batches_match_the_shares_exactly(make_args: Make) -> None:
    source = RolloutDataSource(make_args())
    batches = [tasks(source.get_samples(4)) for _ in range(6)]
    assert batches == [["copy", "sort", "copy", "add"]] * 6
    thirds = RolloutDataSource(make_args(weights={"copy": 0.1, "sort": 0.1, "add": 0.1}))
    assert Counter(tasks(thirds.get_samples(300))) == {"copy": 100, "sort": 100, "add": 100}


# epochs


@pytest.mark.parametrize("streaming", [False, True])
def test_each_dataset_has_its_own_epochs(make_args: Make, streaming: bool) -> None:
    args = make_args(rollout_shuffle=True, streaming_data=streaming)
    source = RolloutDataSource(args)
    seen: dict[str, list[str]] = {name: [] for name in SIZES}
    for group in source.get_samples(84):
        seen[group[0].task].append(group[0].prompt)
    for name, size in SIZES.items():
        whole = [f"{name} {i}" for i in range(size)]
        epochs = [seen[name][i : i + size] for i in range(0, len(seen[name]) - size + 1, size)]
        assert len(epochs) >= 3
        assert all(sorted(epoch) == whole for epoch in epochs)
        assert any(epoch != epochs[0] for epoch in epochs)
    assert prompts(RolloutDataSource(args).get_samples(84)) != prompts(
        RolloutDataSource(make_args(rollout_shuffle=True, rollout_seed=1)).get_samples(84)
    )
    assert (len(source), source.epoch_id, source.sample_offset, source.num_rollout_per_epoch) == (15, 5, 9, 3)


def test_datasets_of_equal_length_are_shuffled_differently(make_args: Make) -> None:
    args = make_args(sizes={"copy": 40, "add": 40}, rollout_shuffle=True)
    found: dict[str, list[int]] = {"copy": [], "add": []}
    for group in RolloutDataSource(args).get_samples(60):
        found[group[0].task].append(group[0].label)
    assert found["copy"][:20] != found["add"][:20]


def test_long_prompts_do_not_count_towards_a_share(make_args: Make) -> None:
    """`copy` keeps only its shortest prompts and still provides its full share."""
    whole, streamed = (
        RolloutDataSource(
            make_args(sizes={"copy": 12, "add": 7}, more={"copy": {"max_prompt_len": 6}}, streaming_data=streaming)
        ).get_samples(30)
        for streaming in (False, True)
    )
    assert prompts(whole) == prompts(streamed)
    assert Counter(tasks(whole)) == {"copy": 20, "add": 10}
    assert {group[0].prompt for group in whole if group[0].task == "copy"} == {f"copy {i}" for i in range(10)}


# settings of a prompt


def test_prompt_gets_reward_and_functions_of_its_dataset(make_args: Make) -> None:
    more: dict[str, Any] = {
        "copy": {"rm_type": "f1", "metadata_overrides": {"list": [1]}, "prompt_suffix": "!"},
        "sort": {"custom_rm_path": "m.sorted", "custom_generate_function_path": "m.generate"},
    }
    source = RolloutDataSource(make_args(more=more, custom_rm_path="m.all"))
    copying, sorting, again, adding = source.get_samples(4)
    for sample in (*copying, *again):
        assert (sample.metadata, sample.custom_rm_path) == ({"rm_type": "f1", "list": [1]}, BY_RM_TYPE)
    assert (sorting[0].custom_rm_path, sorting[0].generate_function_path) == ("m.sorted", "m.generate")
    assert (adding[0].custom_rm_path, adding[0].generate_function_path, adding[0].metadata) == (None, None, {})
    assert prompts([copying, sorting, again, adding]) == ["copy 0!", "sort 0", "copy 1!", "add 0"]
    copying[0].metadata["list"].append("changed")
    assert again[0].metadata["list"] == [1]
    assert [sample.index for group in (copying, sorting) for sample in group] == [0, 1, 2, 3]
    assert Sample.from_dict(copying[0].to_dict()).task == "copy"


def test_labels_are_checked_for_the_reward_of_their_dataset(make_args: Make, write_jsonl: Callable[..., str]) -> None:
    odd = write_jsonl([{"input": "x", "answer": {"value": 1}}], "odd.jsonl")
    free = {"copy": {"path": odd, "custom_rm_path": "m.f"}}
    assert RolloutDataSource(make_args(more=free, rm_type="f1")).get_samples(1)[0][0].label == {"value": 1}
    typed = {"copy": {"path": odd, "rm_type": "f1"}}
    with pytest.raises(UserError, match=r"odd\.jsonl:1: the label must be"):
        RolloutDataSource(make_args(more=typed, custom_rm_path="m.f"))


def test_prompt_key_of_a_dataset_is_not_replaced_by_another_column(
    make_args: Make, write_jsonl: Callable[..., str]
) -> None:
    odd = write_jsonl([{"question": "x", "answer": 1}], "odd.jsonl")
    with pytest.raises(UserError, match=r"odd\.jsonl:1: .*input"):
        RolloutDataSource(make_args(more={"copy": {"path": odd, "input_key": "input"}}))


# resumption


@pytest.mark.parametrize("before", [0, 1, 7, 33])
def test_resume_from_a_saved_position_is_exact(make_args: Make, before: int) -> None:
    args = make_args(rollout_shuffle=True)
    whole = RolloutDataSourceWithBuffer(args)
    whole.get_samples(before)
    whole.save(3)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(3)
    assert resumed.get_samples(40) == whole.get_samples(40)
    state = json.loads(json.dumps(whole.state_dict()))
    assert sum(state["mixture"][name]["given"] for name in SIZES) == before + 40


def test_changed_weights_apply_from_the_resumed_position(make_args: Make, caplog: pytest.LogCaptureFixture) -> None:
    first = RolloutDataSource(make_args(weights={"copy": 1, "sort": 1, "add": 1}))
    first.get_samples(30)
    first.save(0)
    doubled = RolloutDataSource(make_args(weights={"copy": 2, "sort": 2, "add": 2}))
    with caplog.at_level(logging.WARNING):
        doubled.load(0)
    assert caplog.messages == []
    other = RolloutDataSource(make_args(weights={"copy": 1, "sort": 1, "add": 8}))
    with caplog.at_level(logging.WARNING):
        other.load(0)
    assert "was saved with the weights copy 1, sort 1, add 1: the proportions of prompts have changed" in caplog.text
    found = other.get_samples(10)
    assert Counter(tasks(found)) == {"copy": 1, "sort": 1, "add": 8}
    assert [group[0].prompt for group in found if group[0].task == "add"][:4] == ["add 3", "add 4", "add 5", "add 6"]


def test_rejects_a_position_saved_with_other_data(make_args: Make, model_folder: Path, write_jsonl: Any) -> None:
    RolloutDataSource(make_args()).save(0)
    for changed, sentence in (
        ({"sizes": {"copy": 5, "sort": 3}}, "a position in the datasets copy, sort, add, but --prompt-config has copy, sort;"),
        ({"sizes": {**SIZES, "sort": 4}}, "data_state_0.json, dataset sort: .*sort.jsonl had 3 prompts when this was saved, now 4"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            RolloutDataSource(make_args(**changed)).load(0)
    args = make_args()
    single = Config(hf_checkpoint=str(model_folder), prompt_data=write_jsonl([{"input": "x"}]), load=args.load)
    with pytest.raises(UserError, match=r"is a position in the datasets of .*tasks.json, but this run reads .*prompts"):
        RolloutDataSource(single).load(0)
    RolloutDataSource(single.replace(save=args.load)).save(1)
    with pytest.raises(UserError, match=r"prompts.jsonl, but this run reads the datasets of .*tasks.json"):
        RolloutDataSource(args).load(1)


def test_crash_recovery_keeps_prompts_and_shares(make_args: Make, tmp_path: Path) -> None:
    """With groups assigned, dropped, put back and in flight, no prompt is lost or repeated and the shares hold."""
    args = make_args(rollout_shuffle=True)
    undisturbed = RolloutDataSource(args).get_samples(40)

    def begin(start: int) -> JournaledSource:
        source = JournaledSource(RolloutDataSourceWithBuffer(args), open_journal(tmp_path))
        source.resume(start)
        return source

    source = begin(0)
    groups = source.get_samples(10)
    for group in groups[:8]:
        for sample in group:
            source.journal.produced(sample, finish(sample))
    source.assign(0, groups[:4], {})
    source.drop([groups[5]])
    source.add_samples([groups[6], groups[7]])
    source.journal.close()  # as after a kill: 4, 8 and 9 are in flight

    source = begin(0)
    assert source.batch(0) is not None
    found = source.get_samples(34)
    left = [undisturbed[number] for number in (4, 6, 7, 8, 9)]
    assert sorted(prompts(found[:5])) == sorted(prompts(left))
    assert sorted(tasks(found[:5])) == sorted(tasks(left))
    assert prompts(found[5:]) == prompts(undisturbed[10:39])
    assert tasks(found[5:]) == tasks(undisturbed[10:39])


def test_changed_data_files_change_the_run_identity(make_args: Make) -> None:
    args = make_args()
    files = [dataset.path for dataset in args.train_datasets]
    facts = run_identity(args, files)
    assert facts["prompt data"].count("bytes") == 3
    assert run_identity(make_args(weights={"copy": 1, "sort": 5, "add": 1}), files) == facts
    make_args(sizes={**SIZES, "sort": 9})
    assert run_identity(args, files) != facts
