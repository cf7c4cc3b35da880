"""Journal retention: the last rollouts and evaluations stay for inspection, within a byte limit."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config
from slime.data.buffer import Journal, JournaledSource, Recovered
from slime.data.buffer import open_journal as open_of_run
from slime.data.buffer.database import FORMAT, JournalContents, classify_contents
from slime.data.custom_source import UserSource
from slime.data.sample import Sample
from slime.errors import UserError
from tests.data.journal_samples import finish, finished, open_journal, prompts

EVERYTHING = 10**9


class Endless:
    """A user-defined data source."""

    def __init__(self) -> None:
        self.handed_out = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        self.handed_out += num_samples
        return [prompts(self.handed_out + number) for number in range(num_samples)]


def rows(journal: Journal, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(journal.path)) as connection:
        return connection.execute(query, values).fetchall()


def train(journal: Journal, rollout: int, groups: int = 3) -> None:
    batch = [finished(journal, groups * rollout + number) for number in range(groups)]
    journal.assign(rollout, batch, {"n": rollout})
    journal.consumed(rollout)
    journal.checkpointed(rollout)


def kept(journal: Journal) -> list[tuple[int, int]]:
    """Return the kept rollouts with their number of samples."""
    return rows(journal, "SELECT rollout_id, COUNT(*) FROM trajectories GROUP BY rollout_id ORDER BY rollout_id")


def size_of_a_rollout(folder: Path) -> int:
    journal = open_journal(folder, keep_bytes=EVERYTHING)
    train(journal, 0)
    ((size,),) = rows(journal, "SELECT bytes FROM kept")
    journal.close()
    return int(size)


def test_last_whole_rollouts_are_kept_within_the_byte_limit(tmp_path: Path) -> None:
    size = size_of_a_rollout(tmp_path / "one")
    journal = open_journal(tmp_path, keep_bytes=2 * size + size // 2)
    for rollout in range(8):
        train(journal, rollout)
    journal.drop([finished(journal, 100)])
    train(journal, 8)
    assert kept(journal) == [(7, 6), (8, 6)]
    total = rows(journal, "SELECT SUM(LENGTH(payload) + LENGTH(prompt) + LENGTH(response)) FROM samples")[0][0]
    assert rows(journal, "SELECT value + 0, SUM(bytes) FROM meta, kept WHERE key = 'kept_bytes'") == [
        (total + 12 * 100, total + 12 * 100)  # plus a fixed size per sample for the other columns
    ]
    assert rows(journal, "SELECT COUNT(*) FROM groups") == [(6,)]  # the dropped group was pruned too
    journal.close()
    journal = open_journal(tmp_path, keep_bytes=0)
    journal.recover(9)
    train(journal, 9)
    assert kept(journal) == []


def test_rollout_larger_than_the_byte_limit_is_kept_in_part(tmp_path: Path) -> None:
    size = size_of_a_rollout(tmp_path / "one")
    journal = open_journal(tmp_path, keep_bytes=size - 1)
    train(journal, 0)
    assert rows(journal, "SELECT rollout_id, position FROM groups ORDER BY position") == [(0, 0), (0, 1)]
    assert rows(journal, "SELECT bytes FROM kept") == rows(journal, "SELECT value + 0 FROM meta WHERE key='kept_bytes'")
    train(journal, 1)
    assert kept(journal) == [(1, 4)]


def test_rollouts_after_the_checkpoint_are_never_pruned(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, keep_bytes=1)
    journal.recover(0)
    batches = [[finished(journal, number)] for number in range(3)]
    for number, batch in enumerate(batches):
        journal.assign(number, batch, {})
    waiting = finished(journal, 5)
    journal.consumed(0)
    journal.consumed(1)
    journal.checkpointed(0)
    assert kept(journal) == [(None, 2), (1, 2), (2, 2)]
    recovered = journal.recover(1)
    assert (recovered.batches, recovered.groups) == ([1, 2], [waiting])
    assert [journal.batch(number) for number in (1, 2)] == [(batches[1], {}), (batches[2], {})]


def recovered(folder: Path, keep_bytes: int, start: int) -> Recovered:
    """Restart after three checkpointed rollouts, one later rollout and one group in flight."""
    journal = open_journal(folder, keep_bytes=keep_bytes)
    journal.recover(0)
    for rollout in range(3):
        train(journal, rollout)
    journal.assign(3, [finished(journal, 20)], {"n": 3})
    journal.consumed(3)
    journal.hand_out([prompts(21)], {"offset": 22})
    journal.close()
    again = open_journal(folder, keep_bytes=keep_bytes)
    found = again.recover(start)
    again.close()
    for sample in (sample for group in found.groups for sample in group):
        sample.journal_id = None
    return found


@pytest.mark.parametrize("start", [3, 4])
def test_kept_samples_do_not_affect_recovery(tmp_path: Path, start: int) -> None:
    assert recovered(tmp_path / "a", EVERYTHING, start) == recovered(tmp_path / "b", 0, start)


def test_restart_before_kept_rollouts_sets_the_journal_aside(tmp_path: Path) -> None:
    found = recovered(tmp_path, EVERYTHING, 2)
    assert (found.fresh, found.batches, found.moved) == (True, [], tmp_path / "journal-1.sqlite")
    assert found.moved_work  # rollout 3 and the group in flight
    with closing(sqlite3.connect(tmp_path / "journal-1.sqlite")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM trajectories WHERE state = 'consumed'").fetchone() == (20,)


def steps_of_a_checkpoint(journal: Journal, rollout: int) -> int:
    """Count the steps of SQLite's virtual machine during a checkpoint, in tens."""
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return 0

    batch = [finished(journal, rollout)]
    journal.assign(rollout, batch, {})
    journal.consumed(rollout)
    with journal._database.reading() as connection:
        connection.set_progress_handler(count, 10)
    journal.checkpointed(rollout)
    with journal._database.reading() as connection:
        connection.set_progress_handler(None, 10)
    return counted


@pytest.mark.parametrize("keep_bytes", [EVERYTHING, 20_000])
def test_checkpoint_cost_does_not_grow_with_kept_samples(tmp_path: Path, keep_bytes: int) -> None:
    journal = open_journal(tmp_path, keep_bytes=keep_bytes)
    steps = [steps_of_a_checkpoint(journal, rollout) for rollout in range(120)]
    assert max(steps[-10:]) <= 1.5 * max(steps[60:70])
    assert (len(kept(journal)) == 120) == (keep_bytes == EVERYTHING)


def evaluated(journal: Journal) -> list[tuple[int, str, int]]:
    return rows(journal, "SELECT step, dataset, COUNT(*) FROM evaluated GROUP BY step, dataset ORDER BY step, dataset")


def answers(count: int, reward: float = 1.0) -> list[Sample]:
    return [finish(Sample(index=number, group_index=number, prompt="q", label="7"), reward) for number in range(count)]


def test_evaluations_are_kept_with_step_and_dataset(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, keep_bytes=EVERYTHING)
    journal.recover(0)
    for step in (0, 2, 4):
        journal.keep_evaluation(step, {"math": answers(3), "code": answers(1, 0.0)})
    journal.keep_evaluation(2, {"math": answers(2, 0.5)})  # repeated after a crash
    assert evaluated(journal) == [
        (0, "code", 1), (0, "math", 3), (2, "math", 2), (4, "code", 1), (4, "math", 3),
    ]  # fmt: skip
    assert rows(journal, "SELECT DISTINCT reward FROM evaluated WHERE step = 2") == [(0.5,)]
    finished(journal, 0)
    journal.recover(0)  # the weights of steps 2 and 4 are lost
    assert evaluated(journal) == [(0, "code", 1), (0, "math", 3)]
    bytes_there = rows(journal, "SELECT SUM(bytes) FROM evaluations")[0][0]
    assert rows(journal, "SELECT value + 0 FROM meta WHERE key = 'evaluation_bytes'") == [(bytes_there,)]


def test_evaluations_have_their_own_byte_limit(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "one", keep_bytes=EVERYTHING)
    journal.keep_evaluation(0, {"math": answers(4)})
    ((size,),) = rows(journal, "SELECT bytes FROM evaluations")
    bounded = open_journal(tmp_path, keep_bytes=2 * size)
    for step in range(5):
        bounded.keep_evaluation(step, {"math": answers(4)})
    assert evaluated(bounded) == [(3, "math", 4), (4, "math", 4)]
    bounded.keep_evaluation(5, {"math": answers(50), "code": answers(50)})  # each dataset gets half of the limit
    assert evaluated(bounded) == [(5, "code", 4), (5, "math", 4)]
    nothing = open_journal(tmp_path / "none", keep_bytes=0)
    nothing.keep_evaluation(0, {"math": answers(4)})
    assert evaluated(nothing) == []
    everything = open_journal(tmp_path / "all", keep=True)
    everything.keep_evaluation(0, {"math": answers(50)})
    assert evaluated(everything) == [(0, "math", 50)]


def test_unsupported_evaluation_sample_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = open_journal(tmp_path, keep_bytes=EVERYTHING)
    samples = answers(2)
    samples[0].metadata["tool"] = object()
    with caplog.at_level(logging.WARNING):
        journal.keep_evaluation(1, {"math": samples})
    assert evaluated(journal) == [(1, "math", 1)]
    assert "evaluation on math: sample not kept for inspection: sample 0.metadata.tool: a object" in caplog.text


def test_evaluation_reward_uses_eval_reward_key(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite", {}, keep=True, reward_key="train", eval_reward_key="right")
    (sample,) = answers(1)
    sample.reward = {"train": 0.25, "right": 1.0}
    journal.keep_evaluation(0, {"math": [sample]})
    assert rows(journal, "SELECT reward FROM evaluated") == [(1.0,)]


def test_journal_of_an_earlier_version_may_name_a_moved_function(tmp_path: Path) -> None:
    path, before = tmp_path / "journal.sqlite", {"generate function": "slime.agent.live.service.generate"}
    journal = Journal(path, before, keep=True)
    finished(journal, 0)
    journal.close()
    with pytest.raises(UserError, match="is the journal of another run"):
        Journal(path, {"generate function": "mine.generate"}, keep=True)
    again = Journal(path, {"generate function": "slime.agent.online.generate"}, keep=True)
    assert not again.recover(0).fresh
    again.close()


def test_inspection_samples_of_another_run_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = open_journal(tmp_path, keep_bytes=EVERYTHING)
    train(journal, 0)
    journal.close()
    other = open_journal(tmp_path, model="huge")
    assert other.recover(0).fresh
    assert f"the samples of another run are now in {tmp_path / 'journal-1.sqlite'}" in caplog.text
    with closing(sqlite3.connect(tmp_path / "journal-1.sqlite")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM samples").fetchone() == (6,)
    finished(other, 9)  # unsaved work
    other.close()
    with pytest.raises(UserError, match="is the journal of another run"):
        open_journal(tmp_path)


def test_journal_of_format_1_is_upgraded(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, keep_bytes=EVERYTHING)
    journal.recover(0)
    group = finished(journal, 0)
    with journal._database.reading() as connection:
        connection.executescript(
            "DROP VIEW evaluated; DROP TABLE evaluated_samples; DROP TABLE evaluations; DROP TABLE kept;"
            "DROP TABLE referred;"
            "PRAGMA user_version=1;"
        )
    journal.close()
    journal = open_journal(tmp_path, keep_bytes=EVERYTHING)
    assert journal.recover(0).groups == [group]
    journal.assign(0, [group], {})
    journal.checkpointed(0)
    journal.keep_evaluation(1, {"math": answers(1)})
    assert (kept(journal), evaluated(journal)) == ([(0, 2)], [(1, "math", 1)])
    assert rows(journal, "PRAGMA user_version") == [(FORMAT,)]


def test_keep_samples_mb_limits_the_kept_samples(tmp_path: Path) -> None:
    config = Config(hf_checkpoint=str(tmp_path), data_source_path="x", rollout_function_path="y")
    journal = open_of_run(config, tmp_path / "a.sqlite")
    train(journal, 0)
    journal.keep_evaluation(1, {"math": answers(1)})
    assert (kept(journal), evaluated(journal)) == ([(0, 6)], [(1, "math", 1)])
    journal = open_of_run(config.replace(keep_samples_mb=0.0005), tmp_path / "b.sqlite")
    train(journal, 0)
    assert kept(journal) == [(0, 2)]


@pytest.mark.parametrize("keep_bytes", [0, EVERYTHING])
def test_journal_without_a_position_is_fresh_after_a_checkpoint(tmp_path: Path, keep_bytes: int) -> None:
    journal = open_journal(tmp_path, keep_bytes=keep_bytes)
    journal.recover(0)
    group = prompts(0)
    journal.hand_out([group], None)
    journal.assign(0, [[finish(sample) for sample in group]], {})
    journal.consumed(0)
    journal.checkpointed(0)
    assert kept(journal) == ([(0, 2)] if keep_bytes else [])
    assert journal.recover(1).fresh


def test_journal_with_only_evaluations_is_set_aside(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, keep_bytes=EVERYTHING)
    journal.recover(0)
    journal.keep_evaluation(0, {"math": answers(1)})
    moved = journal.recover(3)
    assert (moved.moved, moved.moved_work) == (tmp_path / "journal-1.sqlite", False)
    assert evaluated(journal) == []


@pytest.mark.parametrize("unfinished", [False, True])
def test_second_run_warns_only_about_unconsumed_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unfinished: bool
) -> None:
    for _ in range(2):
        journal = open_journal(tmp_path, keep_bytes=EVERYTHING)
        source = JournaledSource(UserSource(Endless(), Config()), journal)
        with caplog.at_level(logging.INFO):
            source.resume(0)
        groups = source.get_samples(2)
        journal.assign(0, [[finish(sample) for sample in groups[0]]], {})
        journal.consumed(0)
        if not unfinished:
            journal.drop(groups[1:])
        else:
            journal.put_back([[finish(sample) for sample in groups[1]]])
        journal.checkpointed(0)  # without --save the next run starts at 0 again
        journal.close()
    (record,) = [record for record in caplog.records if "earlier run" in record.message]
    assert record.levelno == (logging.WARNING if unfinished else logging.INFO)
    assert record.message.endswith(f"they are now in {tmp_path / 'journal-1.sqlite'}")


def test_content_check_reads_no_samples(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, keep=True)
    train(journal, 0)
    with journal._database.reading() as connection:
        traced: list[str] = []
        connection.set_trace_callback(traced.append)
        assert classify_contents(connection) is JournalContents.WORK  # with --keep-samples its batches can be replayed
        connection.set_trace_callback(None)
        plans = [row[3] for query in traced for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert any("groups_by_state" in plan for plan in plans)
    assert not any("samples" in plan for plan in plans)
