"""Journal recovery after a restart: fixed cases, a stateful model of the invariants, and killed processes."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slime.config import Config
from slime.data.buffer import Journal, JournaledSource
from slime.data.custom_source import UserSource
from slime.data.sample import Sample
from slime.data.source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.errors import UserError
from tests.data.journal_samples import finish, finished, open_journal, prompts
from tests.rows import examples


def indices(groups: list[Any]) -> list[int]:
    return [group[0].group_index for group in groups]


def copy_journal_files(journal: Journal, folder: Path) -> Path:
    """Copy the journal files, as a killed process would leave them, into a new folder."""
    copied = Path(tempfile.mkdtemp(dir=folder))
    for file in journal.path.parent.glob("journal.sqlite*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, copied)
    return copied


# restart rules


def test_batches_after_the_checkpoint_are_replayed(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    assert journal.recover(0).fresh
    batches = [[finished(journal, 2 * number), finished(journal, 2 * number + 1)] for number in range(4)]
    for number, groups in enumerate(batches[:3]):
        journal.assign(number, groups[::-1], {"rollout/number": number})
    journal.consumed(0)
    journal.consumed(1)
    journal.close()
    journal = open_journal(tmp_path)
    recovered = journal.recover(1)
    assert (recovered.fresh, recovered.batches, recovered.position) == (False, [1, 2], {"offset": 8})
    assert recovered.groups == batches[3]
    with closing(sqlite3.connect(journal.path)) as connection:
        states = connection.execute("SELECT DISTINCT rollout_id, state, consumed_by FROM groups ORDER BY id").fetchall()
    assert states == [(0, "consumed", 0), (1, "assigned", None), (2, "assigned", None), (None, "finished", None)]
    assert journal.batch(0) is None
    for number in (1, 2):
        assert journal.batch(number) == (batches[number][::-1], {"rollout/number": number})
    assert journal.recover(3).batches == []  # a checkpoint covers batch 2: it was trained on
    assert journal.batch(2) is None
    assert journal.recover(0).batches == [0, 1, 2]  # nothing is pruned yet: all batches are replayed
    assert journal.batch(0) == (batches[0][::-1], {"rollout/number": 0})


def test_mismatched_checkpoint_sets_the_journal_aside_and_starts_a_new_one(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.recover(0)
    journal.assign(0, [finished(journal, 0)], {})
    journal.consumed(0)
    journal.checkpointed(0)
    group = finished(journal, 1)
    assert journal.recover(1).groups == [group]
    recovered = journal.recover(0)
    assert (recovered.fresh, recovered.groups, recovered.batches) == (True, [], [])
    assert recovered.moved == tmp_path / "journal-1.sqlite"
    aside = Journal(tmp_path / "journal-1.sqlite", {"model": "tiny", "prompt data": "sums.jsonl, 10 bytes"}, keep=False)
    assert aside.recover(1).groups == [group]
    aside.close()
    journal.assign(0, [finished(journal, 7)], {})
    journal.consumed(0)
    journal.checkpointed(0)
    journal.hand_out([prompts(8)], {"offset": 9})
    assert journal.recover(0).moved is None  # the journal held only prompts
    finished(journal, 9)
    assert journal.recover(5).moved == tmp_path / "journal-2.sqlite"  # the journal is behind the checkpoint
    assert sorted(file.name for file in tmp_path.glob("*.sqlite")) == [
        "journal-1.sqlite",
        "journal-2.sqlite",
        "journal.sqlite",
    ]


def test_journal_may_start_at_a_later_rollout(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    assert journal.recover(5).fresh
    assert journal.recover(5).fresh  # nothing was recorded since
    journal.assign(5, [finished(journal, 0)], {})
    assert journal.recover(5).batches == [5]
    assert journal.recover(6).batches == []
    assert journal.recover(4).fresh
    assert journal.recover(4).moved is None


# stateful model of the invariants


class Machine(RuleBasedStateMachine):
    """Model state: open groups by number, batches by rollout, consumed rollouts and dropped groups."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.live: dict[int, list[Any]] = {}
        self.buffered: list[int] = []
        self.batches: dict[int, list[int]] = {}
        self.trained: set[int] = set()
        self.dropped: set[int] = set()
        self.next_group = 0
        self.next_rollout = 0
        self.start = 0

    @initialize(keep_bytes=st.sampled_from([0, 1000, 10**6]))
    def begin(self, keep_bytes: int) -> None:
        self.keep_bytes = keep_bytes
        self.journal = open_journal(self.folder, keep_bytes=keep_bytes)
        assert self.journal.recover(0).fresh

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.folder)

    def in_flight(self) -> list[int]:
        return [number for number in self.live if number not in self.buffered]

    @rule(count=st.integers(1, 3))
    def hand_out(self, count: int) -> None:
        groups = []
        for _ in range(count):
            if self.buffered:
                groups.append(self.live[self.buffered.pop(0)])
            else:
                self.live[self.next_group] = prompts(self.next_group)
                groups.append(self.live[self.next_group])
                self.next_group += 1
        self.journal.hand_out(groups, {"offset": self.next_group})

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data(), kind=st.sampled_from(["finished", "partial", "fan-out", "failed"]))
    def produce(self, data: st.DataObject, kind: str) -> None:
        group = self.live[data.draw(st.sampled_from(self.in_flight()))]
        place = data.draw(st.integers(0, 1))
        dispatched = group[place]
        if not isinstance(dispatched, Sample) or dispatched.status is Sample.Status.COMPLETED:
            return
        twin = copy.deepcopy(dispatched)
        if kind == "partial":
            group[place] = finish(dispatched, None, tokens=2)
            asyncio.run(self.journal.record_progress(group[place]))
        elif kind == "fan-out":
            group[place] = [finish(copy.deepcopy(dispatched), reward) for reward in (0.5, 0.25)]
        elif kind == "failed":
            dispatched.status = Sample.Status.FAILED
        else:
            finish(dispatched, 0.75)
        self.journal.produced(twin, group[place])

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.in_flight()))
        self.buffered.append(number)
        self.journal.put_back([self.live[number]])

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.in_flight()))
        self.journal.drop([self.live.pop(number)])
        self.dropped.add(number)

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.in_flight()), unique=True, min_size=1))
        groups = [self.live.pop(number) for number in chosen]
        self.journal.assign(self.next_rollout, groups, {"n": self.next_rollout})
        self.batches[self.next_rollout] = chosen
        self.next_rollout += 1

    def next_to_train(self) -> int | None:
        waiting = [number for number in self.batches if number not in self.trained]
        return min(waiting, default=None)

    @precondition(lambda self: self.next_to_train() is not None)
    @rule()
    def consume(self) -> None:
        rollout = self.next_to_train()
        assert rollout is not None
        self.journal.consumed(rollout)
        self.trained.add(rollout)

    @precondition(lambda self: any(rollout >= self.start for rollout in self.trained))
    @rule()
    def checkpoint(self) -> None:
        self.start = max(self.trained) + 1
        self.journal.checkpointed(self.start - 1)

    @rule()
    def crash(self) -> None:
        """Restart from the last checkpoint with the files that a kill would leave."""
        before = {rollout: self.journal.batch(rollout) for rollout in self.batches if rollout not in self.trained}
        folder = copy_journal_files(self.journal, self.folder)
        self.journal.close()
        self.journal = open_journal(folder, keep_bytes=self.keep_bytes)
        recovered = self.journal.recover(self.start)
        if self.next_group == 0:
            assert recovered.fresh
            return
        assert recovered.position == {"offset": self.next_group}
        assert recovered.batches == sorted(rollout for rollout in self.batches if rollout >= self.start)
        assert recovered.groups == [self.live[number] for number in sorted(self.live)]
        assert all(self.journal.batch(rollout) == batch for rollout, batch in before.items())
        self.live = dict(zip(sorted(self.live), recovered.groups, strict=True))
        self.buffered = sorted(self.live)
        self.trained = {rollout for rollout in self.trained if rollout < self.start}

    @invariant()
    def every_group_is_where_it_belongs_and_nowhere_else(self) -> None:
        with sqlite3.connect(self.journal.path) as connection:
            rows = connection.execute("SELECT group_index, state, rollout_id, consumed_by FROM groups").fetchall()
        connection.close()
        places = {number: (state, rollout, consumed) for number, state, rollout, consumed in rows}
        assert len(places) == len(rows)
        for rollout, numbers in self.batches.items():
            state = ("consumed", rollout, rollout) if rollout in self.trained else ("assigned", rollout, None)
            found = {places.pop(number, None) for number in numbers}
            if rollout >= self.start or self.keep_bytes == 10**6:
                assert found == {state}
            else:  # pruned, or among the last ones that are kept for inspection
                assert found <= ({None, state} if self.keep_bytes else {None})
        for number in self.live:
            state, rollout, consumed = places.pop(number)
            assert (rollout, consumed) == (None, None)
            assert state in ("pending", "partial", "finished")
            if number in self.buffered and all(
                not isinstance(member, Sample) or member.status in (Sample.Status.COMPLETED, Sample.Status.FAILED)
                for member in self.live[number]
            ):
                assert state in ("finished", "pending")
        assert set(places) <= self.dropped
        assert all(state == "dropped" for state, _, _ in places.values())


Machine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=25, deadline=None)
TestJournalAgainstAModel = Machine.TestCase


# killed processes

WRITER = """
import sys
from pathlib import Path
from tests.data.journal_samples import finish, open_journal, prompts

journal = open_journal(Path(sys.argv[1]))
start = int(sys.argv[2])
recovered = journal.recover(start)
waiting = recovered.groups
offset = (recovered.position or {"offset": 0})["offset"]
for rollout in range(start, 10**9):
    replayed = journal.batch(rollout)
    if replayed is None:
        while len(waiting) < 3:
            waiting.append(prompts(offset))
            offset += 1
            journal.hand_out(waiting[-1:], {"offset": offset})
        for group in waiting[:2]:
            for sample in group:
                if sample.status.value != "completed":
                    finish(sample, float(sample.index))
                    journal.produced(sample, sample)
                    print("finished", sample.index, flush=True)
        journal.put_back(waiting[2:])
        batch, waiting = waiting[:2], waiting[2:]
        journal.assign(rollout, batch, {"first": batch[0][0].index})
    else:
        batch = replayed[0]
        assert replayed[1] == {"first": batch[0][0].index}
    print("train", rollout, *[sample.index for group in batch for sample in group], flush=True)
    journal.consumed(rollout)
    if rollout % 5 == 4:
        print("saved", rollout, flush=True)
        journal.checkpointed(rollout)
"""


def test_sigkill_at_random_times_loses_and_repeats_no_sample(tmp_path: Path) -> None:
    rng = random.Random(0)
    start = 0
    batches: dict[int, list[int]] = {}
    finished_ones: set[int] = set()
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(start)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(rng.randint(1, 100))]  # the writer is running
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        assert process.wait() == -signal.SIGKILL
        for line in lines:
            if not line.endswith("\n"):
                continue
            word, *numbers = line.split()
            values = [int(number) for number in numbers]
            if word == "saved":
                start = max(start, values[0] + 1)
            elif word == "finished":
                assert values[0] not in finished_ones, "was finished before, and generated again"
                finished_ones.add(values[0])
            else:
                rollout, *trained = values
                assert batches.setdefault(rollout, trained) == trained, "was trained on with other samples"
    trained_on = [index for rollout in sorted(batches) for index in batches[rollout]]
    assert len(batches) > 10
    assert sorted(batches) == list(range(len(batches)))
    assert trained_on == list(range(len(trained_on))), "no sample twice, none left out"
    assert max(finished_ones) <= max(trained_on) + 4


# data sources

ROWS = [{"input": f"question {number}"} for number in range(9)]


@pytest.fixture
def config(tmp_path: Path, model_folder: Path, write_jsonl: Any) -> Config:
    run = str(tmp_path / "run")
    return Config(
        hf_checkpoint=str(model_folder),
        prompt_data=write_jsonl(ROWS),
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        rollout_shuffle=True,
        save=run,
        load=run,
    )


def test_source_resumes_from_the_journal_position(tmp_path: Path, config: Config) -> None:
    uninterrupted = [group[0].prompt for group in RolloutDataSource(config).get_samples(9)]
    source = JournaledSource(RolloutDataSourceWithBuffer(config), open_journal(tmp_path))
    assert source.resume(0) == []
    assert len(source) == 9
    source.rollout_id = 3
    assert source.source.rollout_id == 3
    first = source.get_samples(4)
    for sample in first[0]:
        source.journal.produced(sample, finish(sample))
    source.journal.assign(0, first[:1], {})
    source.add_samples([first[2]])
    assert source.get_buffer_length() == 1
    source.journal.produced(first[1][0], finish(first[1][0], None, tokens=2))
    first[3][1].tokens = [9]
    first[3][1].append_response_tokens(tokens=[5], log_probs=[-1.0])  # no engine call of this sample has finished
    asyncio.run(source.journal.record_progress(first[3][1]))
    source.journal.close()  # no checkpoint was saved

    again = JournaledSource(RolloutDataSourceWithBuffer(config), open_journal(tmp_path))
    assert again.resume(0) == [0]
    assert again.journal.batch(0) == (first[:1], {})
    served = again.get_samples(5)
    assert first[3][1].status is Sample.Status.PENDING
    first[3][1].status = Sample.Status.ABORTED
    assert served[:3] == first[1:]
    assert [group[0].prompt for group in first + served[3:]] == uninterrupted[:6]
    assert [group[0].group_index for group in served[3:]] == [4, 5]
    assert [sample.index for group in served[3:] for sample in group] == [8, 9, 10, 11]


def test_new_journal_records_the_buffer_of_the_checkpoint(tmp_path: Path, config: Config) -> None:
    before = RolloutDataSourceWithBuffer(config)
    groups = before.get_samples(3)
    groups[1][0] = [finish(groups[1][0], 0.5)]  # a fan-out
    before.add_samples(groups[1:])
    before.save(4)
    source = JournaledSource(RolloutDataSourceWithBuffer(config), open_journal(tmp_path))
    assert source.resume(5) == []
    (served,) = source.get_samples(1)
    assert [sample.reward for sample in served[0]] == [0.5]
    source.journal.close()
    again = JournaledSource(RolloutDataSourceWithBuffer(config), open_journal(tmp_path))
    assert again.resume(5) == []
    groups = again.get_samples(3)
    assert [group[1].group_index for group in groups] == [1, 2, 3]
    assert groups[0] == served
    with sqlite3.connect(again.journal.path) as connection:
        assert connection.execute("SELECT COUNT(*) FROM groups").fetchone() == (3,)


def test_source_without_a_buffer_recovers_its_groups(tmp_path: Path, config: Config) -> None:
    source = JournaledSource(RolloutDataSource(config), open_journal(tmp_path))
    source.resume(0)
    first = source.get_samples(2)
    with pytest.raises(UserError, match="has no buffer"):
        source.add_samples(first)
    source.journal.close()
    again = JournaledSource(RolloutDataSource(config), open_journal(tmp_path))
    again.resume(0)
    assert again.get_samples(1) == first[:1]
    assert indices(again.get_samples(2)) == [1, 2]


class Counting(RolloutDataSourceWithBuffer):
    """A subclass with an extra field in its state."""

    def __init__(self, args: Config) -> None:
        super().__init__(args)
        self.asked = 0

    def get_samples(self, num_samples: int) -> list[Any]:
        self.asked += 1
        return super().get_samples(num_samples)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "asked": self.asked}

    def load_state_dict(self, state: dict[str, Any], *, origin: str = "") -> None:
        super().load_state_dict(state, origin=origin)
        self.asked = state["asked"]


def test_extra_state_of_a_subclass_is_restored(tmp_path: Path, config: Config) -> None:
    source = JournaledSource(Counting(config), open_journal(tmp_path))
    source.resume(0)
    source.get_samples(1)
    source.add_samples(source.get_samples(1))
    assert "buffer" not in source.position()
    assert len(source.source.buffer) == 1
    source.journal.close()
    again = JournaledSource(Counting(config), open_journal(tmp_path))
    again.resume(0)
    assert again.asked == 2
    assert len(again.source.buffer) == 2


class Naturals:
    """A user-defined source with the minimal interface."""

    def __init__(self) -> None:
        self.next = 0

    def get_samples(self, count: int) -> list[Sample]:
        numbers = range(self.next, self.next + count)
        self.next += count
        return [Sample(prompt=str(number)) for number in numbers]


class SavedNaturals(Naturals):
    """A source with its own buffer that saves its position in `save` and `load`, like upstream's sources."""

    saved: dict[int, Any]

    def __init__(self, saved: dict[int, Any]) -> None:
        super().__init__()
        self.saved = saved
        self.buffer: list[Any] = []

    def get_samples(self, count: int) -> list[Any]:
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken + super().get_samples(count - len(taken))

    def add_samples(self, groups: list[Any]) -> None:
        self.buffer += groups

    def save(self, rollout_id: int) -> None:
        self.saved[rollout_id] = (self.next, copy.deepcopy(self.buffer))

    def load(self, rollout_id: int | None) -> None:
        if rollout_id in self.saved:
            self.next, self.buffer = copy.deepcopy(self.saved[rollout_id])


class StatefulNaturals(Naturals):
    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("kind", [Naturals, SavedNaturals, StatefulNaturals])
@pytest.mark.parametrize("start", [0, 1])
def test_user_sources_hand_out_no_prompt_twice_after_a_restart(
    tmp_path: Path, kind: Any, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(rollout_batch_size=1, n_samples_per_prompt=2, data_source_path="naturals")
    saved: dict[int, Any] = {}

    def make() -> JournaledSource:
        inner = kind(saved) if kind is SavedNaturals else kind()
        return JournaledSource(UserSource(inner, config), open_journal(tmp_path))

    source = make()
    source.resume(0)
    first = source.get_samples(3)
    source.journal.assign(0, first[:1], {})
    source.journal.consumed(0)
    source.add_samples(first[1:2])
    source.save(0)
    second = source.get_samples(3)  # the first one was put back
    assert [group[0].prompt for group in second] == ["1", "3", "4"]
    if start:
        source.journal.checkpointed(0)
    source.journal.close()

    again = make()
    with caplog.at_level(logging.WARNING):
        assert again.resume(start) == ([] if start else [0])
    assert not caplog.records
    served = again.get_samples(6)
    assert [group[0].prompt for group in served] == ["1", "2", "3", "4", "5", "6"]
    assert [group[0].group_index for group in served] == [1, 2, 3, 4, 5, 6]
    assert [sample.index for group in served for sample in group] == list(range(2, 14))
    assert json.loads(json.dumps(again.source.position()))["handed_out"] == 7


def test_group_with_a_fan_out_is_recovered_with_a_user_source(tmp_path: Path) -> None:
    config = Config(rollout_batch_size=1, n_samples_per_prompt=2, data_source_path="naturals")
    source = JournaledSource(UserSource(SavedNaturals({}), config), open_journal(tmp_path))
    source.resume(0)
    (group,) = source.get_samples(1)
    fan_out = [finish(copy.deepcopy(group[0]), 0.5), finish(copy.deepcopy(group[0]), 0.6)]
    source.journal.produced(group[0], fan_out)
    source.journal.close()
    again = JournaledSource(UserSource(SavedNaturals({}), config), open_journal(tmp_path))
    again.resume(0)
    assert again.get_samples(1) == [[fan_out, group[1]]]
