"""Buffered groups in a saved data position: responses are stored once, in the journal, and restored from it."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config
from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.data.source import RolloutDataSourceWithBuffer
from slime.data.source_state import buffer_from_state
from slime.errors import UserError
from tests.data.journal_samples import finish, open_journal

ROWS = [{"input": f"question {number}", "label": number, "metadata": {"row": number}} for number in range(9)]
SENTENCE = (
    "{path}: {count} buffered prompts start over, because the journal with their responses is missing or has changed"
)


@pytest.fixture
def config(tmp_path: Path, model_folder: Path, write_jsonl: Callable[..., str]) -> Config:
    save = str(tmp_path / "checkpoints")
    return Config(
        hf_checkpoint=str(model_folder),
        prompt_data=write_jsonl(ROWS),
        label_key="label",
        metadata_key="metadata",
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        save=save,
        load=save,
    )


def started(config: Config, folder: Path, start: int = 0) -> JournaledSource:
    source = JournaledSource(RolloutDataSourceWithBuffer(config), open_journal(folder))
    source.resume(start)
    return source


def source_with_saved_buffer(config: Config, folder: Path) -> tuple[JournaledSource, list[Any]]:
    """Create a source; its checkpoint of rollout 0 buffers a finished group with a fan-out, a partial and a new one."""
    source = started(config, folder)
    trained, done, partial, new = source.get_samples(4)
    trained = [finish(sample) for sample in trained]
    done[0] = [finish(copy.deepcopy(done[0]), 0.25, tokens=40), finish(copy.deepcopy(done[0]), 0.75)]
    finish(done[1], 1.0, tokens=30)
    finish(partial[0], None, tokens=20)
    source.add_samples([done, partial, new])
    source.journal.assign(0, [trained], {})
    source.journal.consumed(0)
    source.save(0)
    source.journal.checkpointed(0, kept={0})
    return source, copy.deepcopy([done, partial, new])


def train_and_save(source: JournaledSource, groups: list[Any], kept: set[int]) -> None:
    """Train on groups in rollout 1 and save it."""
    source.journal.assign(1, groups, {})
    source.journal.consumed(1)
    source.save(1)
    source.journal.checkpointed(1, kept=kept)


def without_journal_ids(groups: list[Any]) -> list[Any]:
    """Copy groups without the ids that a journal assigned to their samples."""
    groups = copy.deepcopy(groups)
    for group in groups:
        for member in group:
            for sample in member if isinstance(member, list) else [member]:
                sample.journal_id = None
    return groups


def state_of(config: Config, rollout_id: int = 0) -> dict[str, Any]:
    path = Path(str(config.save)) / "rollout" / f"data_state_{rollout_id}.json"
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def prompts_of(groups: list[Any]) -> list[Any]:
    return [
        (group[0].group_index, group[0].prompt, group[0].label, group[0].metadata, [one.index for one in group])
        for group in groups
    ]


def test_state_holds_no_responses_that_the_journal_holds(config: Config, tmp_path: Path) -> None:
    source, (done, partial, new) = source_with_saved_buffer(config, tmp_path / "run")
    state = state_of(config)
    assert state["buffer_journal"] == source.journal.name()
    assert state["buffer"][2][1] == {
        "recorded": {"id": new[1].journal_id, "response_length": 0, "weights": []},
        "prompt": {
            "group_index": 3,
            "index": 7,
            "prompt": "question 3",
            "label": 3,
            "metadata": {"row": 3},
        },
    }
    assert [entry["recorded"] for entry in (*state["buffer"][0][0], state["buffer"][1][0])] == [
        {"id": done[0][0].journal_id, "response_length": 40, "weights": ["0"]},
        {"id": done[0][1].journal_id, "response_length": 3, "weights": ["0"]},
        {"id": partial[0].journal_id, "response_length": 20, "weights": ["0"]},
    ]
    for word in ("tokens", "log_probs", "loss_mask", '"abc"', "-0.5"):
        assert word not in json.dumps(state["buffer"])


def test_restart_restores_the_buffered_groups(config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, groups = source_with_saved_buffer(config, tmp_path / "run")
    source.journal.close()
    again = started(config, tmp_path / "run", 1)
    assert again.source.buffer == groups
    assert again.get_samples(4)[3][0].prompt == "question 4"
    assert not caplog.records


def test_restart_restores_progress_made_after_the_checkpoint(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, groups = source_with_saved_buffer(config, tmp_path / "run")
    _, partial, _ = source.get_samples(3)
    source.journal.produced(partial[0], finish(partial[0], 1.0, version="1"))
    source.journal.close()
    again = started(config, tmp_path / "run", 1)
    assert again.source.buffer == [groups[0], partial, groups[2]]
    assert not caplog.records


def test_older_checkpoint_restores_groups_consumed_since(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, groups = source_with_saved_buffer(config, tmp_path / "run")
    trained, dropped, _ = source.get_samples(3)
    source.journal.drop([dropped])
    train_and_save(source, [trained], kept={0, 1})  # keep_bytes is 0: no sample is kept for inspection
    source.journal.close()
    caplog.clear()
    again = started(config, tmp_path / "run", 1)
    assert without_journal_ids(again.source.buffer) == without_journal_ids(groups)
    assert [record.getMessage() for record in caplog.records] == [
        f"the samples of an earlier run do not match rollout 1: they are now in {tmp_path / 'run/journal-1.sqlite'}"
    ]
    again.journal.close()
    once_more = started(config, tmp_path / "run", 1)  # the groups are now in the new journal
    assert without_journal_ids(once_more.source.buffer) == without_journal_ids(groups)


def test_groups_of_a_deleted_checkpoint_are_pruned(config: Config, tmp_path: Path) -> None:
    source, _ = source_with_saved_buffer(config, tmp_path / "run")
    trained, dropped, _ = source.get_samples(3)
    source.journal.drop([dropped])
    train_and_save(source, [trained], kept={0, 1})
    query = "SELECT group_index, state FROM groups ORDER BY group_index"
    with source.journal._database.reading() as connection:
        assert connection.execute(query).fetchall() == [(1, "consumed"), (2, "dropped"), (3, "pending")]
    source.journal.assign(2, source.get_samples(1), {})
    source.save(2)
    source.journal.checkpointed(2, kept={1, 2})
    with source.journal._database.reading() as connection:
        assert connection.execute(query).fetchall() == [(3, "pending")]
        assert connection.execute("SELECT COUNT(*) FROM samples").fetchall() == [(2,)]


def test_changed_groups_start_over_from_an_older_checkpoint(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, groups = source_with_saved_buffer(config, tmp_path / "run")
    done, partial, _ = source.get_samples(3)
    source.journal.produced(partial[0], finish(partial[0], 1.0, version="1"))
    train_and_save(source, [done, partial], kept={0, 1})
    source.journal.close()
    again = started(config, tmp_path / "run", 1)
    assert without_journal_ids(again.source.buffer[::2]) == without_journal_ids(groups[::2])
    (_, over, _) = again.source.buffer
    assert (over[0].status, over[0].tokens, over[0].response_length) == (Sample.Status.PENDING, [], 0)
    assert prompts_of([over]) == prompts_of([partial])
    path = Path(str(config.save)) / "rollout/data_state_0.json"
    assert caplog.records[-1].getMessage() == SENTENCE.format(path=path, count=1)


@pytest.mark.parametrize("is_journaled", [True, False])
def test_prompts_start_over_without_the_journal(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_journaled: bool
) -> None:
    source, groups = source_with_saved_buffer(config, tmp_path / "run")
    source.journal.close()
    loaded = started(config, tmp_path / "elsewhere", 1).source if is_journaled else RolloutDataSourceWithBuffer(config)
    if not is_journaled:
        loaded.load(0)
    path = Path(str(config.save)) / "rollout/data_state_0.json"
    assert [record.getMessage() for record in caplog.records] == [SENTENCE.format(path=path, count=2)]
    done, partial, new = groups
    assert prompts_of(loaded.buffer) == prompts_of([[done[0][0], done[1]], partial, new])
    fresh = RolloutDataSourceWithBuffer(config).get_samples(4)[1:]
    assert without_journal_ids(loaded.buffer) == fresh
    assert loaded.get_samples(4)[3][0].prompt == "question 4"


def test_journal_is_found_in_the_checkpoint_folder(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, groups = source_with_saved_buffer(config, tmp_path / "run")
    source.journal.close()
    (tmp_path / "checkpoints/journal-7.sqlite").write_text("something else")
    shutil.copy(tmp_path / "run/journal.sqlite", tmp_path / "checkpoints/journal.sqlite")
    with caplog.at_level(logging.WARNING):
        again = started(config, tmp_path / "elsewhere", 1)
    assert without_journal_ids(again.source.buffer) == without_journal_ids(groups)
    assert not caplog.records


def test_samples_without_a_journal_are_saved_in_full(config: Config, tmp_path: Path) -> None:
    plain = RolloutDataSourceWithBuffer(config)
    (group,) = plain.get_samples(1)
    finish(group[0])
    plain.add_samples([group])
    plain.save(0)
    assert state_of(config)["buffer"][0][0]["tokens"] == [9, 100, 101, 102]
    assert "buffer_journal" not in state_of(config)

    again = started(config, tmp_path / "run", 1)  # like the state of an earlier version
    assert without_journal_ids(again.source.buffer) == [group]
    again.source.buffer.append([finish(Sample(index=99, prompt="from nowhere"))])
    again.save(1)
    (recorded, whole) = state_of(config, 1)["buffer"]
    assert ("recorded" in recorded[0], whole[0]["tokens"]) == (True, [9, 100, 101, 102])


def test_token_prompt_is_kept_if_it_starts_over(config: Config, tmp_path: Path) -> None:
    source = started(config, tmp_path / "run")
    (group,) = source.get_samples(1)
    group[0].prompt, group[0].tokens = "", [5, 6, 7]
    finish(group[0], None)
    source.add_samples([group])
    source.save(0)
    source.journal.close()
    over = started(config, tmp_path / "elsewhere", 1).source.buffer[0][0]
    assert (over.tokens, over.response_length, over.response) == ([5, 6, 7], 0, "")


@pytest.mark.parametrize("entry", [[], 7, {"recorded": {}, "prompt": {}}, {"recorded": None, "prompt": None}])
def test_rejects_damaged_references(entry: Any, config: Config, tmp_path: Path) -> None:
    records = started(config, tmp_path / "run").source.records
    state = {"buffer": [[entry]] if entry else 7, "buffer_journal": "x"}
    with pytest.raises(UserError, match=r"^place: its buffered groups are unreadable"):
        buffer_from_state(state, records, "place")
