from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, derive
from slime.config.plugins.view import plugin_args
from slime.data.sample import Sample
from slime.data.source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.driver.inputs import open_data_source, read_eval_prompts
from slime.errors import UserError
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.data_source import RolloutDataSourceWithBuffer as PluginSource

ROWS = [{"input": f"question {number}", "answer": number, "metadata": {"n": [number]}} for number in range(7)]

MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(write_jsonl: Callable[..., str], model_folder: Path, tmp_path: Path) -> MakeConfig:
    def make(rows: list[Any] = ROWS, **changes: Any) -> Config:
        options: dict[str, Any] = {
            "hf_checkpoint": str(model_folder),
            "prompt_data": write_jsonl(rows),
            "label_key": "answer",
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "save": str(tmp_path / "run"),
            "load": str(tmp_path / "run"),
        }
        return Config(**{**options, **changes})

    return make


def labels(groups: list[list[Sample]]) -> list[int]:
    return [group[0].label for group in groups]


def test_groups_are_numbered_independent_copies(make_config: MakeConfig) -> None:
    source = RolloutDataSource(make_config())
    groups = source.get_samples(3)
    assert labels(groups) == [0, 1, 2]
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]
    assert [[sample.group_index for sample in group] for group in groups] == [[0, 0], [1, 1], [2, 2]]
    groups[0][0].metadata["n"].append("changed")
    assert groups[0][1].metadata == {"n": [0]}
    assert labels(source.get_samples(5)) == [3, 4, 5, 6, 0]
    assert source.get_samples(1)[0][0].metadata == {"n": [1]}
    assert source.epoch_id == 1
    assert len(source) == 7
    assert source.num_rollout_per_epoch == 3
    assert PluginSource is RolloutDataSourceWithBuffer


@pytest.mark.parametrize("streaming", [False, True])
def test_shuffle_visits_each_prompt_once_per_epoch_in_a_new_order(make_config: MakeConfig, streaming: bool) -> None:
    config = make_config(rollout_shuffle=True, streaming_data=streaming)
    walked = labels(RolloutDataSource(config).get_samples(21))
    epochs = [walked[0:7], walked[7:14], walked[14:21]]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert labels(RolloutDataSource(config).get_samples(21)) == walked
    assert labels(RolloutDataSource(config.replace(rollout_seed=43)).get_samples(21)) != walked


def test_streaming_skips_long_prompts_in_the_same_order(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": "é" * number, "answer": number} for number in range(1, 12)]
    config = make_config(rows, rollout_shuffle=True, rollout_max_prompt_len=12)
    whole = labels(RolloutDataSource(config).get_samples(15))
    assert set(whole) == {1, 2, 3, 4, 5, 6}
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert labels(RolloutDataSource(config.replace(streaming_data=True)).get_samples(15)) == whole
    assert caplog.messages == ["dropped 5 of 11 prompts longer than 12 tokens"] * 2
    nothing_left = config.replace(streaming_data=True, rollout_max_prompt_len=1)
    with pytest.raises(UserError, match="every prompt is longer than 1 tokens"):
        RolloutDataSource(nothing_left).get_samples(1)


def test_prompts_beyond_the_context_limit_are_rejected_or_dropped(make_config: MakeConfig) -> None:
    rows = [{"input": "é" * number, "answer": number} for number in (10, 40)]
    with pytest.raises(UserError, match=r"prompts\.jsonl:2: the prompt has 80 tokens .* context of 64"):
        RolloutDataSource(make_config(rows))
    assert len(RolloutDataSource(make_config(rows, rollout_max_context_len=64))) == 1
    assert len(RolloutDataSource(make_config(rows, rollout_max_context_len=21))) == 1
    with pytest.raises(UserError, match="all 2 prompts are longer than 19"):
        RolloutDataSource(make_config(rows, rollout_max_context_len=20))


def test_resumed_source_continues_at_the_saved_position(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(rollout_shuffle=True)
    original = RolloutDataSourceWithBuffer(config)
    original.get_samples(8)
    original.metadata["seen"] = 8
    returned = original.get_samples(2)
    returned[0][0].append_response_tokens(tokens=[3], log_probs=[-0.5], text="x")
    original.add_samples(returned)
    original.save(4)
    assert [path.name for path in (tmp_path / "run" / "rollout").iterdir()] == ["data_state_4.json"]
    state = json.loads((tmp_path / "run" / "rollout" / "data_state_4.json").read_text())
    assert (state["epoch_id"], state["sample_offset"]) == (1, 3)
    assert (state["sample_group_index"], state["sample_index"]) == (10, 20)

    for rollout_id in (4, None):
        resumed = RolloutDataSourceWithBuffer(config)
        resumed.load(rollout_id)
        assert resumed.metadata == {"seen": 8}
        assert resumed.get_buffer_length() == 2
        assert resumed.get_samples(9) == twin_of(config, original).get_samples(9)


def twin_of(config: Config, original: RolloutDataSourceWithBuffer) -> RolloutDataSourceWithBuffer:
    """A source in the state of `original`, made without JSON files."""
    twin = RolloutDataSourceWithBuffer(config)
    twin.get_samples(10)
    twin.buffer = [list(group) for group in original.buffer]
    return twin


def test_load_without_a_saved_position_starts_at_the_beginning(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    source = RolloutDataSource(make_config())
    source.load(-1)
    assert caplog.messages == []
    source.load(3)
    assert "no saved data position for rollout 3" in caplog.text
    assert labels(source.get_samples(1)) == [0]
    nowhere = RolloutDataSource(make_config(save=None, load=None))
    nowhere.save(0)
    nowhere.load(0)


def test_load_without_an_id_uses_the_highest_rollout(make_config: MakeConfig) -> None:
    source = RolloutDataSource(make_config())
    for rollout_id in range(11):
        source.get_samples(1)
        source.save(rollout_id)
    resumed = RolloutDataSource(make_config())
    resumed.load()
    assert resumed.sample_group_index == 11


def test_rejects_a_position_saved_with_other_data(make_config: MakeConfig, write_jsonl: Callable[..., str]) -> None:
    config = make_config()
    RolloutDataSource(config).save(0)
    for other, message in (
        (config.replace(prompt_data=write_jsonl(ROWS, "other.jsonl")), r"is a position in .*prompts\.jsonl, but"),
        (config.replace(prompt_data=config.prompt_data + "@[:3]"), "is a position in"),
        (config.replace(disable_rollout_global_dataset=True), "was saved with a prompt dataset"),
    ):
        with pytest.raises(UserError, match=message):
            RolloutDataSource(other).load(0)
    write_jsonl(ROWS[:-1])
    with pytest.raises(UserError, match="had 7 prompts when this was saved, now 6"):
        RolloutDataSource(config).load(0)
    write_jsonl([*ROWS[:-1], {**ROWS[-1], "input": "another question"}])
    with pytest.raises(UserError, match="bytes when this was saved"):
        RolloutDataSource(config).load(0)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"dataset": 3}'])
def test_rejects_a_damaged_position(make_config: MakeConfig, tmp_path: Path, content: str) -> None:
    path = tmp_path / "run" / "rollout" / "data_state_0.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(UserError, match=r"data_state_0\.json"):
        RolloutDataSourceWithBuffer(make_config()).load(0)


def test_failed_save_keeps_the_previous_file(make_config: MakeConfig, tmp_path: Path) -> None:
    source = RolloutDataSourceWithBuffer(make_config())
    source.save(0)
    source.metadata["handle"] = object()
    with pytest.raises(UserError, match=r"metadata\.handle: a object cannot be saved"):
        source.save(0)
    (path,) = (tmp_path / "run" / "rollout").iterdir()
    assert json.loads(path.read_text())["metadata"] == {}


def test_buffered_groups_are_handed_out_first(make_config: MakeConfig) -> None:
    source = RolloutDataSourceWithBuffer(make_config())
    first = source.get_samples(3)
    source.add_samples(first)
    assert labels(source.get_samples(2)) == [0, 1]
    assert labels(source.get_samples(2)) == [2, 3]
    assert source.get_buffer_length() == 0
    with pytest.raises(TypeError, match="list of groups"):
        source.add_samples(first[0])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="RolloutDataSource has no buffer"):
        RolloutDataSource(make_config()).add_samples(first)


def test_buffer_filter_path_selects_the_buffered_groups(make_config: MakeConfig, tmp_path: Path) -> None:
    plugin = tmp_path / "filters.py"
    plugin.write_text(
        "def newest(args, rollout_id, buffer, num_samples):\n"
        "    assert rollout_id is None\n"
        "    return [buffer.pop()]\n"
        "def greedy(args, rollout_id, buffer, num_samples):\n"
        "    return list(buffer)\n"
        "def wrong(args):\n"
        "    return []\n"
    )
    source = RolloutDataSourceWithBuffer(make_config(buffer_filter_path=f"{plugin}:newest"))
    source.add_samples(source.get_samples(3))
    assert labels(source.get_samples(2)) == [2, 3]
    assert source.get_buffer_length() == 2
    source = RolloutDataSourceWithBuffer(make_config(buffer_filter_path=f"{plugin}:greedy"))
    source.add_samples(source.get_samples(3))
    with pytest.raises(UserError, match="returned 3 groups when asked for at most 2"):
        source.get_samples(2)
    with pytest.raises(UserError, match="--buffer-filter-path"):
        RolloutDataSourceWithBuffer(make_config(buffer_filter_path=f"{plugin}:wrong"))


def test_without_a_dataset_samples_are_empty(make_config: MakeConfig) -> None:
    source = RolloutDataSourceWithBuffer(make_config(disable_rollout_global_dataset=True, prompt_data=None))
    groups = source.get_samples(2)
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3]]
    assert groups[1][0].prompt == ""
    assert len(source) == 0
    source.save(0)
    source.load(0)
    with pytest.raises(UserError, match="--prompt-data"):
        RolloutDataSource(make_config(prompt_data=None))


def test_buffered_fan_outs_survive_a_state_dict_round_trip(make_config: MakeConfig) -> None:
    source = RolloutDataSourceWithBuffer(make_config())
    first, second = source.get_samples(1)[0]
    fanned = [[first, Sample(index=7, rollout_id=7)], second]
    source.add_samples([fanned])
    again = RolloutDataSourceWithBuffer(make_config())
    again.load_state_dict(source.state_dict())
    assert again.buffer == [fanned]
    assert again.get_samples(1) == [fanned]
    for wrong in ([[[]]], [[[1]]], [[]], [first]):
        with pytest.raises(TypeError, match="add_samples takes a list of groups"):
            source.add_samples(wrong)


def test_buffer_filter_receives_the_rollout_id(make_config: MakeConfig, tmp_path: Path) -> None:
    plugin = tmp_path / "which.py"
    plugin.write_text(
        "def which(args, rollout_id, buffer, num_samples):\n    buffer[0][0].metadata['r'] = rollout_id\n"
        "    return [buffer.pop(0)]\n"
    )
    source = RolloutDataSourceWithBuffer(make_config(buffer_filter_path=f"{plugin}:which"))
    source.add_samples(source.get_samples(1))
    groups = call_rollout_fn(lambda a, r, d, evaluation: d.get_samples(1), None, 12, source, evaluation=False).samples
    assert groups[0][0].metadata["r"] == 12


def test_label_parsing_depends_on_the_reward_flags(make_config: MakeConfig) -> None:
    said = [{"role": "assistant", "content": [{"type": "text", "text": "4"}]}]
    rows = [{"input": "2+2=", "answer": said}]
    assert labels(RolloutDataSource(make_config(rows, rm_type="math")).get_samples(1)) == ["4"]
    assert labels(RolloutDataSource(make_config(rows, custom_rm_path="mine.f")).get_samples(1)) == [said]
    with pytest.raises(UserError, match=r"prompts\.jsonl:1: the label must be a text"):
        RolloutDataSource(make_config([{"input": "2+2=", "answer": {"value": 4}}], rm_type="math"))


@pytest.mark.parametrize("own", [False, True])
def test_prompt_column_is_inferred_if_only_one_matches(
    make_config: MakeConfig, write_jsonl: Callable[..., str], tmp_path: Path, own: bool
) -> None:
    rows = [{"question": f"{number}+1=", "answer": number} for number in range(4)]
    evaluated = write_jsonl(rows[:2], "eval.jsonl")
    (tmp_path / "mine.py").write_text(
        "from slime.data.source import RolloutDataSource\n"
        "class Source(RolloutDataSource):\n"
        "    def __init__(self, args):\n"
        "        super().__init__(args)\n"
        "        args.source_is = self\n"
    )
    path = {"data_source_path": f"{tmp_path / 'mine.py'}:Source"} if own else {}

    def config_of(**changes: Any) -> Config:
        evaluation = {"eval_prompt_data": [("sums", evaluated)], "eval_interval": 1}
        return derive(make_config(rows, device="cpu", rm_type="random", **evaluation, **path, **changes))

    config = config_of()
    source = open_data_source(config)
    assert source.get_samples(1)[0][0].prompt == "0+1="
    assert [sample.prompt for sample in read_eval_prompts(config)["sums"].prompts] == ["0+1=", "1+1="]
    assert plugin_args(config).input_key == "input"
    assert not own or plugin_args(config).source_is is source
    with pytest.raises(UserError, match="no key 'input'"):
        open_data_source(config_of(input_key="input"))
