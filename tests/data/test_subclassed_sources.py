"""Data sources and datasets as slime plugins use them: from a plain namespace, by subclassing, or directly."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config.config import FLAG_SPECS
from slime.data.buffer import Journal, JournaledSource
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.data_source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from slime.utils.data import Dataset, filter_long_prompt, read_file
from tests.migration.plugins.curriculum import EasyFirst, Walker

ROWS = [{"input": f"question {number}", "label": str((number * 5) % 7)} for number in range(7)]


@pytest.fixture
def args(write_jsonl: Callable[..., str], model_folder: Path, tmp_path: Path) -> Namespace:
    """Arguments as written in a notebook."""
    return Namespace(
        hf_checkpoint=str(model_folder),
        prompt_data=write_jsonl(ROWS),
        label_key="label",
        rollout_global_dataset=True,
        n_samples_per_prompt=2,
        save=str(tmp_path / "run"),
        load=str(tmp_path / "run"),
    )


def labels(groups: Any) -> list[str]:
    return [group[0].label for group in groups]


def test_plain_namespace_works_as_args(args: Namespace) -> None:
    source = RolloutDataSourceWithBuffer(args)
    assert isinstance(source, DataSource)
    assert labels(source.get_samples(2)) == ["0", "5"]
    assert [sample.label for sample in source.dataset.origin_samples] == [row["label"] for row in ROWS]
    args.n_samples_per_prompt = 3
    assert len(source.get_samples(1)[0]) == 3
    source.args.n_samples_per_prompt = 1
    assert args.n_samples_per_prompt == 1
    with pytest.raises(AttributeError, match="no such_flag"):
        _ = source.args.such_flag
    empty = RolloutDataSource(Namespace(rollout_global_dataset=False, n_samples_per_prompt=2))
    assert (empty.dataset, len(empty)) == (None, 0)
    assert [sample.prompt for sample in empty.get_samples(1)[0]] == ["", ""]


def test_missing_args_have_the_defaults_of_the_flags(args: Namespace) -> None:
    given = {*vars(args), "disable_rollout_global_dataset"}
    source = RolloutDataSource(args)
    for name in FLAG_SPECS.keys() - given:
        assert getattr(source.args, name) == FLAG_SPECS[name].default
    assert not source.args.disable_rollout_global_dataset


def test_data_source_is_abstract() -> None:
    class Half(DataSource):
        def get_samples(self, num_samples: int) -> list[Any]:
            return []

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize("shuffle", [False, True])
def test_plugin_traversal_matches_the_base_class(args: Namespace, shuffle: bool) -> None:
    args.rollout_shuffle = shuffle
    ours, theirs = RolloutDataSource(args), Walker(args)
    for count in (3, 3, 4, 7, 1):
        assert theirs.get_samples(count) == ours.get_samples(count)
    ours.save(0)
    resumed = Walker(args)
    resumed.load(0)
    assert resumed.get_samples(5) == theirs.get_samples(5)


def test_samples_set_by_a_subclass_are_used_until_the_epoch_ends(args: Namespace) -> None:
    source = EasyFirst(args)
    assert labels(source.get_samples(9)) == ["0", "1", "2", "3", "4", "5", "6", "0", "1"]
    args.rollout_shuffle = True
    shuffled = EasyFirst(args)
    assert labels(shuffled.get_samples(7)) == ["0", "1", "2", "3", "4", "5", "6"]
    assert labels(shuffled.get_samples(7)) == labels([[sample] for sample in shuffled.dataset.samples])
    assert labels([[sample] for sample in shuffled.dataset.samples]) != ["0", "1", "2", "3", "4", "5", "6"]


def test_custom_dataset_replaces_the_file(args: Namespace) -> None:
    class Mine:
        def __init__(self) -> None:
            self.samples = [Sample(prompt=f"p{number}") for number in range(3)]

        def __len__(self) -> int:
            return len(self.samples)

        def shuffle(self, new_epoch_id: int) -> None:
            random.Random(new_epoch_id).shuffle(self.samples)

    source = RolloutDataSource(args)
    source.dataset = Mine()
    assert [group[0].prompt for group in source.get_samples(4)] == ["p0", "p1", "p2", "p0"]
    state = source.state_dict()
    source.load_state_dict(state)
    source.dataset.samples = []
    with pytest.raises(UserError, match="RolloutDataSource: its dataset has no samples to hand out"):
        source.get_samples(1)


def test_overridden_buffer_method_is_used(args: Namespace) -> None:
    class NewestFirst(RolloutDataSourceWithBuffer):
        def _get_samples_from_buffer(self, num_samples: int) -> list[Any]:
            return [self.buffer.pop() for _ in range(min(num_samples, len(self.buffer)))]

    source = NewestFirst(args)
    source.add_samples(source.get_samples(3))
    assert labels(source.get_samples(4)) == ["3", "5", "0", "1"]


def test_groups_of_a_subclass_are_validated_and_numbered(args: Namespace, tmp_path: Path) -> None:
    class Odd(RolloutDataSourceWithBuffer):
        answer: Any = None

        def get_samples(self, num_samples: int) -> list[Any]:
            return self.answer  # type: ignore[no-any-return]

    source = Odd(args)
    journaled = JournaledSource(source, Journal(tmp_path / "journal.sqlite", {}, keep=True))
    source.answer = [[Sample(prompt="a"), Sample(prompt="a")], [Sample(prompt="b")]]
    handed_out = journaled.get_samples(2)
    assert [[(sample.group_index, sample.index) for sample in group] for group in handed_out] == [
        [(0, 0), (0, 1)],
        [(1, 2)],
    ]
    assert (source.sample_group_index, source.sample_index) == (2, 3)
    source.answer = [Sample(prompt="a")]
    with pytest.raises(UserError, match=r"Odd\.get_samples must return a list of groups"):
        journaled.get_samples(1)
    journaled.journal.close()


def test_dataset_can_be_used_directly(write_jsonl: Callable[..., str], byte_tokenizer: Any) -> None:
    rows = [{"text": "é" * number, "answer": number, "tools": [{"name": "t"}]} for number in range(1, 8)]
    path = write_jsonl(rows)
    dataset = Dataset(path, byte_tokenizer, None, 10, label_key="answer", tool_key="tools", seed=3)
    assert [sample.label for sample in dataset.samples] == [1, 2, 3, 4, 5]
    assert dataset[0].metadata == {"tools": [{"name": "t"}]}
    dataset.shuffle(1)
    first = list(dataset.samples)
    assert sorted(sample.label for sample in first) == [1, 2, 3, 4, 5]
    assert [sample.label for sample in dataset.origin_samples] == [1, 2, 3, 4, 5]
    assert (len(dataset), dataset[0]) == (5, first[0])
    dataset.shuffle(1)
    assert dataset.samples == first
    dataset.shuffle(2)
    assert dataset.samples != first
    keys = {"image": "images"}
    assert len(Dataset(path, byte_tokenizer, None, None, prompt_key="text", multimodal_keys=keys)) == len(rows)
    pictured = write_jsonl([*rows, {**rows[0], "images": ["a.png"]}])
    with pytest.raises(
        UserError, match=r"'images' holds the image of this prompt \(--multimodal-keys\), but only text prompts are"
    ):
        Dataset(pictured, byte_tokenizer, None, None, multimodal_keys=keys)


def test_read_file_and_filter_long_prompt_work_directly(write_jsonl: Callable[..., str], byte_tokenizer: Any) -> None:
    path = write_jsonl([{"n": number} for number in range(5)])
    assert list(read_file(f"{path}@[1:-1]")) == [{"n": 1}, {"n": 2}, {"n": 3}]
    samples = [Sample(prompt=text) for text in ("éééé", "é", "ééé")]
    assert filter_long_prompt(samples, byte_tokenizer, None, 6) == samples[1:]
    assert filter_long_prompt(samples, byte_tokenizer, None, None) == samples


def test_filter_long_prompt_accepts_custom_tokenizer_and_processor() -> None:
    def tokenizer(texts: list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [text.split() for text in texts]}

    def processor(text: str, images: list[str], **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": [[*text.split(), *images]]}

    words, short = Sample(prompt="a b c"), Sample(prompt="a")
    said = Sample(prompt=[{"role": "user", "content": "a b c"}])
    assert filter_long_prompt([], tokenizer, None, 2) == []
    assert filter_long_prompt([words, short, said], tokenizer, None, 2) == [short, said]
    one, two = (Sample(prompt="a", multimodal_inputs={"images": ["x"] * count}) for count in (1, 2))
    assert filter_long_prompt([two, words, one, short], tokenizer, processor, 2) == [one, short]
