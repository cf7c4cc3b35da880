"""The journal does not rewrite rows of unchanged samples and writes every changed sample."""

from __future__ import annotations

import asyncio
import copy
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.cluster.memory.arena import SharedArena
from slime.data.buffer import Journal
from slime.data.buffer.rows import RowCodec, flatten_group
from slime.data.sample import Sample
from slime.errors import UserError
from slime.storage.sqlite_store import JournalFailed
from tests.data.journal_samples import finish, finished, open_journal, prompts, statements

MESSAGES = [{"role": "user", "content": "hello"}]


def recorded_group(journal: Journal, arena: SharedArena, number: int = 0) -> list[Any]:
    """Create a group ready for a batch: recorded by the journal's thread, with its columns in shared memory."""
    group = prompts(number)
    journal.hand_out([group], {"offset": number + 1})
    for sample in group:
        sample.metadata = {"deep": {"list": [{"x": 1}]}, "array": np.array([1])}
        sample.train_metadata = {"weight": 1}
        sample.prompt = copy.deepcopy(MESSAGES)
        sample.rollout_routed_experts = np.zeros((3, 2, 2), np.int32)
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = [1, 2], [0, 1, 2, 2]
        sample.teacher_log_probs = [-0.25, -0.5, -0.75]
        sample.tokens = [9]
        sample.response_length, sample.loss_mask, sample.rollout_log_probs = 3, [1, 0, 1], [-0.5, 0.0, -0.5]
        sample.tokens = [9, 100, 101, 102]
        sample.response, sample.reward, sample.status = "abc", 1.0, Sample.Status.COMPLETED

    async def record() -> None:
        await asyncio.gather(*(journal.record(sample, sample) for sample in group))

    asyncio.run(record())
    for sample in group:
        sample.keep_with(arena.keep)
    return group


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[SharedArena]:
    made = SharedArena(tmp_path)
    yield made
    made.close()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = open_journal(tmp_path)
    yield made
    made.close()


def test_recorded_samples_are_not_written_again(
    journal: Journal, arena: SharedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [recorded_group(journal, arena, number) for number in range(3)]
    groups.append(finished(journal, 3))  # with columns that were not packed again
    encoded: list[Sample] = []
    monkeypatch.setattr(RowCodec, "columns", lambda self, sample: encoded.append(sample))
    with statements(journal) as seen:
        journal.assign(5, groups[::-1], {"x": 1.0})
    assert (seen, encoded) == ([], [])
    monkeypatch.undo()
    assert journal.batch(5) == (groups[::-1], {"x": 1.0})
    with journal._database.reading() as connection:
        assert connection.execute("SELECT state, rollout_id, position FROM groups ORDER BY id").fetchall() == [
            ("assigned", 5, place) for place in (3, 2, 1, 0)
        ]


def test_column_hashes_survive_the_move_to_shared_memory(journal: Journal, arena: SharedArena) -> None:
    [sample] = finished(journal, 0, 1)
    hashed = {name: vars(sample)[name].digest for name in ("tokens", "loss_mask", "rollout_log_probs")}
    assert None not in hashed.values()
    sample.keep_with(arena.keep)
    assert {name: vars(sample)[name].digest for name in hashed} == hashed
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0])
    assert [vars(sample)[name].digest for name in hashed] == [None] * 3


def _set(name: str, value: Any) -> Callable[[Sample], None]:
    return lambda sample: setattr(sample, name, value)


def _item(name: str, place: int, value: Any) -> Callable[[Sample], None]:
    return lambda sample: getattr(sample, name).__setitem__(place, value)


CHANGES: dict[str, Callable[[Sample], None]] = {
    "reward": _set("reward", 2.0),
    "reward of another type": _set("reward", 1),
    "reward to several": _set("reward", {"score": 1.0}),
    "no reward": _set("reward", None),
    "status": _set("status", Sample.Status.TRUNCATED),
    "failure": _set("failure", "it is bad"),
    "remove_sample": _set("remove_sample", True),
    "response": _set("response", "abd"),
    "prompt": lambda sample: sample.prompt[0].__setitem__("content", "goodbye"),
    "label": _set("label", "42"),
    "metadata": lambda sample: sample.metadata.__setitem__("new", None),
    "metadata deep inside": lambda sample: sample.metadata["deep"]["list"][0].__setitem__("x", 2),
    "metadata of another type": lambda sample: sample.metadata["deep"]["list"][0].__setitem__("x", 1.0),
    "metadata's array": lambda sample: sample.metadata["array"].__setitem__(0, 7),
    "train_metadata": lambda sample: sample.train_metadata.__setitem__("weight", 2),
    "tokens": _item("tokens", 0, 8),
    "tokens anew": _set("tokens", [8, 100, 101, 102]),
    "tokens as an array": lambda sample: setattr(sample, "tokens", np.array(sample.tokens)),
    "loss_mask": _item("loss_mask", 1, 1),
    "loss_mask anew": _set("loss_mask", [0, 0, 1]),
    "no loss_mask": _set("loss_mask", None),
    "rollout_log_probs": _item("rollout_log_probs", 2, -0.75),
    "rollout_log_probs anew": _set("rollout_log_probs", [-0.5, 0.0, -0.1]),
    "teacher_log_probs": _item("teacher_log_probs", 0, -1.0),
    "top-p ids": _item("rollout_top_p_token_ids", 0, 5),
    "top-p offsets": _item("rollout_top_p_token_offsets", 1, 2),
    "routed experts": lambda sample: sample.rollout_routed_experts.__setitem__((0, 0, 0), 1),
    "routed experts of another type": lambda sample: setattr(
        sample, "rollout_routed_experts", sample.rollout_routed_experts.astype(np.int16)
    ),
    "longer response": lambda sample: sample.append_response_tokens(tokens=[4], trainable=False),
    "weight_versions": lambda sample: sample.weight_versions.append("7"),
    "version_spans": lambda sample: sample.version_spans.append(["7", 3]),
    "counters": lambda sample: setattr(sample.spec_info, "spec_verify_ct", 3),
    "group_index": _set("group_index", 77),
    "session_id": _set("session_id", "s"),
    "time": _set("non_generation_time", 0.5),
    "an attribute of its own": _set("kept_by_a_plugin", 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_samples_are_written_again(
    journal: Journal, arena: SharedArena, change: Callable[[Sample], None]
) -> None:
    group = recorded_group(journal, arena)
    before = RowCodec().columns(group[1])
    if change is CHANGES["longer response"]:
        for name in ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts"):
            setattr(group[1], name, None)
    change(group[1])
    assert RowCodec().columns(group[1]) != before
    with statements(journal) as seen:
        journal.assign(0, [group], {})
    assert seen == ["INSERT"]
    assert journal.batch(0) == ([group], {})
    *_, payload = RowCodec().columns(group[1])
    with journal._database.reading() as connection:
        found = connection.execute("SELECT payload FROM samples WHERE id = ?", (group[1].journal_id,)).fetchone()
    assert found == (payload,)


def test_reverted_change_is_not_written(journal: Journal, arena: SharedArena) -> None:
    group = recorded_group(journal, arena)
    group[0].tokens[0] = 4
    group[0].tokens[0] = 9  # now a list with the same numbers
    group[0].response = "".join(["a", "bc"])
    with statements(journal) as seen:
        journal.assign(0, [group], {})
    assert seen == []
    assert journal.batch(0) == ([group], {})


def test_regrouped_samples_are_moved_not_rewritten(journal: Journal, arena: SharedArena) -> None:
    a, b, c = (recorded_group(journal, arena, number) for number in range(3))
    fanned = prompts(3)
    journal.hand_out([fanned], None)
    parts = [finish(copy.deepcopy(fanned[0]), reward) for reward in (0.1, 0.2)]
    journal.produced(fanned[0], parts)
    journal.produced(fanned[1], finish(fanned[1]))
    with statements(journal) as seen:
        journal.put_back([[parts, fanned[1]]])
    assert seen == []
    twin = copy.deepcopy(c[1])
    batch = [[parts, fanned[1]], [b[1], a[0]], [a[1]], [c[0], c[1], twin]]
    with statements(journal) as seen:
        journal.assign(0, batch, {})
    # b[1] is now first in its group, a[0] second and a[1] first in others; b[0] is omitted; one is duplicated
    assert sorted(seen) == ["DELETE", "INSERT", "UPDATE", "UPDATE", "UPDATE"]
    assert journal.batch(0) == (batch, {})
    ids = [leaf.sample.journal_id for group in batch for leaf in flatten_group(group)]
    assert len(set(ids)) == len(ids)


def test_samples_of_an_earlier_process_are_written_again(journal: Journal, arena: SharedArena, tmp_path: Path) -> None:
    group = recorded_group(journal, arena)
    journal.close()
    again = open_journal(tmp_path)
    [found] = again.recover(0).groups
    assert found == group
    found[0].reward = 3.0
    with statements(again) as seen:
        again.assign(0, [found], {})
    assert seen == ["INSERT", "INSERT"]
    assert again.batch(0) == ([found], {})
    again.close()


def test_put_back_writes_only_samples_whose_content_differs(journal: Journal) -> None:
    group = prompts(0)
    journal.hand_out([group], None)
    journal.produced(group[0], finish(group[0], None))
    journal.produced(group[1], finish(group[1]))
    with statements(journal) as seen:
        journal.put_back([group])
        journal.hand_out([group], None)
    assert seen == []
    before = copy.deepcopy(group)
    asyncio.run(journal.record_progress(finish(group[0], None, version="1")))
    with statements(journal) as seen:
        journal.put_back([before])  # the content before the progress: its row holds newer content
    assert seen == ["INSERT"]
    assert journal.samples([before[0].journal_id]) == {before[0].journal_id: before[0]}
    journal.produced(group[0], finish(group[0], version="2"))
    with statements(journal) as seen:
        journal.assign(0, [group], {})
    assert seen == []
    assert journal.batch(0) == ([group], {})


def test_rolled_back_write_is_not_treated_as_written(journal: Journal) -> None:
    group = prompts(0, 1)
    journal.hand_out([group], None)
    with journal._database.reading() as connection:
        connection.execute(
            "CREATE TEMP TRIGGER full BEFORE UPDATE ON groups BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
    with pytest.raises(JournalFailed, match="disk full"):
        journal.produced(group[0], finish(group[0]))
    with journal._database.reading() as connection:
        connection.execute("DROP TRIGGER full")
    journal.assign(0, [group], {})
    assert journal.batch(0) == ([group], {})


def test_changes_of_a_failed_batch_are_written_by_the_next_one(journal: Journal, arena: SharedArena) -> None:
    group = recorded_group(journal, arena)
    group[0].reward = 2.0
    with journal._database.reading() as connection:
        connection.execute(
            "CREATE TEMP TRIGGER full BEFORE INSERT ON rollouts BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
    with pytest.raises(JournalFailed, match="disk full"):
        journal.assign(0, [group], {})
    with journal._database.reading() as connection:
        connection.execute("DROP TRIGGER full")
    with statements(journal) as seen:
        journal.assign(0, [group], {})
    assert seen == ["INSERT"]
    assert journal.batch(0) == ([group], {})


def test_unsupported_value_in_a_batch_is_named_and_nothing_is_recorded(journal: Journal, arena: SharedArena) -> None:
    first, second = recorded_group(journal, arena, 0), recorded_group(journal, arena, 1)
    first[0].reward = 2.0
    second[1].metadata["deep"]["list"].append(object())
    with pytest.raises(UserError, match=r"sample 3\.metadata\.deep\.list: a object"):
        journal.assign(0, [first, second], {})
    never_recorded = Sample(index=9, metadata={"x": {1}})
    with pytest.raises(UserError, match=r"sample 9\.metadata\.x: a set"):
        journal.assign(0, [first, [never_recorded]], {})
    assert journal.batch(0) is None
    journal.assign(0, [first], {})
    assert journal.batch(0) == ([first], {})


def test_contents_are_tracked_only_for_waiting_samples(journal: Journal, arena: SharedArena) -> None:
    taken, left_out, waiting = (recorded_group(journal, arena, number) for number in range(3))
    journal.assign(0, [taken[:1]], {})
    journal.drop([left_out])
    assert set(journal._writer._contents) == {sample.journal_id for sample in waiting}


def test_unrecorded_batch_is_encoded_without_holding_all_payloads(journal: Journal) -> None:
    rng = np.random.default_rng(0)
    groups = []
    for index in range(32):
        sample = Sample(index=index)
        sample.append_response_tokens(
            tokens=rng.integers(0, 2**31, 50_000), log_probs=rng.random(50_000), trainable=True
        )
        groups.append([sample])
    sizes = [len(RowCodec().columns(group[0])[-1]) for group in groups]
    tracemalloc.start()
    journal.assign(0, groups, {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < sum(sizes) / 3
    with journal._database.reading() as connection:
        assert connection.execute("SELECT SUM(LENGTH(payload)) FROM samples").fetchone() == (sum(sizes),)
