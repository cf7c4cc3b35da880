"""Journal writes in a background thread, unusable rows, and the order in which data becomes durable."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.data.buffer import Journal, JournaledSource
from slime.data.buffer.database import Database
from slime.data.sample import Sample
from slime.driver.loop import Run
from slime.errors import UserError
from slime.storage.sqlite_store import JournalFailed
from tests.data.journal_samples import finish, finished, open_journal, prompts


class Transactions:
    """Records the thread of each transaction and can block transactions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        original = Database.transaction

        def counted(database: Database) -> Any:
            self.threads.append(threading.current_thread().name)
            assert self.go_on.wait(240)
            return original(database)

        monkeypatch.setattr(Database, "transaction", counted)


def committed_rows(journal: Journal) -> list[tuple[Any, ...]]:
    """Return the rows that another connection reads from the file."""
    with closing(sqlite3.connect(journal.path)) as connection:
        return connection.execute("SELECT sample_index, status FROM samples ORDER BY id").fetchall()


def test_thread_writes_many_samples_in_one_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    groups = [prompts(number) for number in range(10)]
    journal.hand_out(groups, None)
    samples = [sample for group in groups for sample in group]
    made = Transactions(monkeypatch)

    async def record() -> None:
        made.go_on.clear()
        first = asyncio.ensure_future(journal.record(samples[0], finish(samples[0])))
        while not made.threads:  # noqa: ASYNC110  the thread is at its transaction
            await asyncio.sleep(0.001)
        others = [asyncio.ensure_future(journal.record(one, finish(one))) for one in samples[1:]]
        await asyncio.sleep(0)
        assert not first.done()  # the event loop was not blocked
        made.go_on.set()
        await first
        assert (samples[0].index, "completed") in committed_rows(journal)
        await asyncio.gather(*others)

    asyncio.run(record())
    assert made.threads == ["journal", "journal"]
    assert [status for _, status in committed_rows(journal)] == ["completed"] * 20
    assert len({sample.journal_id for sample in samples}) == 20
    journal.close()


def test_unsupported_sample_fails_alone(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    group = prompts(0, 3)
    journal.hand_out([group], None)
    group[1].metadata["handle"] = object()

    async def record() -> list[Any]:
        work = (journal.record(sample, finish(sample)) for sample in group)
        return await asyncio.gather(*work, return_exceptions=True)

    results = asyncio.run(record())
    assert [type(result) for result in results] == [type(None), UserError, type(None)]
    assert [status for _, status in committed_rows(journal)] == ["completed", "pending", "completed"]
    journal.close()
    with pytest.raises(RuntimeError, match="journal is closed"):
        asyncio.run(journal.record(group[0], group[0]))


def test_awaiting_a_failed_transaction_raises(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    group = prompts(0)
    journal.hand_out([group], None)
    with journal._database.reading() as connection:
        connection.execute("PRAGMA query_only=ON")
    with pytest.raises(JournalFailed, match="cannot be written"):
        asyncio.run(journal.record(group[0], finish(group[0])))
    with journal._database.reading() as connection:
        connection.execute("PRAGMA query_only=OFF")
    asyncio.run(journal.record(group[0], group[0]))
    assert committed_rows(journal)[0][1] == "completed"


def test_failure_after_a_transaction_affects_only_its_own_write(tmp_path: Path) -> None:
    def raising() -> None:
        raise ValueError("too late")

    async def write() -> list[Any]:
        write = journal._database.write
        writes = [write(lambda after=after: lambda connection: after) for after in (raising, None)]
        both = await asyncio.gather(*writes, return_exceptions=True)
        await asyncio.wait_for(write(lambda: lambda connection: None), 240)  # the thread continues
        return both

    journal = open_journal(tmp_path)
    failed, fine = asyncio.run(write())
    assert (repr(failed), fine) == ("ValueError('too late')", None)


def test_writes_are_applied_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is put back while one of its writes waits keeps the state with which it was put back."""
    journal = open_journal(tmp_path)
    group = prompts(0, 1)
    journal.hand_out([group], None)
    made = Transactions(monkeypatch)
    made.go_on.clear()

    async def record() -> None:
        done = finish(prompts(0, 1)[0])
        asyncio.ensure_future(journal.record(group[0], done))  # noqa: RUF006  cancelled with the loop
        while not made.threads:  # noqa: ASYNC110  the thread is at its transaction
            await asyncio.sleep(0.001)
        made.go_on.set()
        journal.put_back([group])

    asyncio.run(record())
    assert committed_rows(journal) == [(0, "pending")]


# unusable rows


def damage_row(journal: Journal, index: int, how: str) -> None:
    """Damage a row like an earlier version without validation (`mask`) or a corrupt file (`bytes`)."""
    with closing(sqlite3.connect(journal.path)) as connection:
        (row_id,) = connection.execute("SELECT id FROM samples WHERE sample_index = ?", (index,)).fetchone()
        if how == "mask":
            sample = journal._rows.sample(row_id, _columns(connection, row_id))
            sample.loss_mask = [1]
            values = journal._rows.columns(sample)
            connection.execute("UPDATE samples SET payload = ? WHERE id = ?", (values[-1], row_id))
        else:
            connection.execute("UPDATE samples SET payload = ? WHERE id = ?", (b"\x00broken", row_id))
        connection.commit()


def _columns(connection: sqlite3.Connection, row_id: int) -> tuple[Any, ...]:
    names = "sample_index, status, reward, response_length, weight_versions, prompt, response, payload"
    return connection.execute(f"SELECT {names} FROM samples WHERE id = ?", (row_id,)).fetchone()


@pytest.mark.parametrize(
    ("how", "cause"),
    [("mask", "BadSample: loss_mask has 1 entries for 3 response tokens"), ("bytes", "ExtraData: ")],
)
def test_bad_row_in_a_batch_fails_only_that_sample(tmp_path: Path, how: str, cause: str) -> None:
    journal = open_journal(tmp_path)
    groups = [finished(journal, number) for number in range(2)]
    journal.assign(0, groups, {})
    damage_row(journal, 1, how)
    journal.close()
    again = open_journal(tmp_path)
    recovered = again.recover(0)
    assert recovered.batches == [0]
    assert [sentence.startswith(f"sample 1 (journal: {cause}") for sentence in recovered.unusable] == [True]
    found = again.batch(0)
    assert found is not None
    (good, bad), other = found[0]
    assert (good, other) == (groups[0][0], groups[1])
    assert bad.status is Sample.Status.FAILED
    assert (bad.index, bad.prompt, bad.reward, bad.response_length) == (1, "question 0", None, 0)
    assert bad.failure is not None
    assert bad.failure.startswith(f"journal: {cause}")
    again.close()
    assert open_journal(tmp_path).recover(0).unusable != []  # it stays failed and is reported again


def test_batch_without_usable_rows_can_be_replaced(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for number in range(2):
        journal.assign(number, [finished(journal, number, 1)], {})
    damage_row(journal, 0, "bytes")
    journal.close()
    again = open_journal(tmp_path)
    assert again.recover(0).batches == [1]
    assert again.batch(0) is None
    again.assign(0, [finished(again, 5, 1)], {})


def test_bad_row_of_a_waiting_group_counts_as_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = open_journal(tmp_path)
    finished(journal, 0)
    damage_row(journal, 0, "mask")
    journal.close()
    source = JournaledSource(SimpleNamespace(add_samples=lambda groups: served.extend(groups)), open_journal(tmp_path))
    source.source.load = lambda _rollout_id: None
    source.source.load_state_dict = lambda _position, **_origin: None
    served: list[Any] = []
    with caplog.at_level(logging.WARNING):
        assert source.resume(0) == []
    assert "1 samples cannot be used and count as failed: sample 0 (journal: BadSample: loss_mask" in caplog.text
    assert [sample.status.value for sample in served[0]] == ["failed", "completed"]
    assert (served[0][0].prompt, served[0][0].group_index) == ("question 0", 0)


# durability order


def test_journal_is_synced_before_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    journal.recover(0)
    journal.assign(0, [finished(journal, 0)], {})
    journal.consumed(0)
    events: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        wal = journal.path.with_name(journal.path.name + "-wal")
        if wal.exists() and os.path.sameopenfile(descriptor, _opened(wal, opened)):
            events.append("journal")
        fsync(descriptor)

    opened: list[int] = []
    monkeypatch.setattr(os, "fsync", noted)
    run: Any = SimpleNamespace(
        journal=journal,
        config=SimpleNamespace(save=str(tmp_path), save_hf=None, async_save=False),
        progress=SimpleNamespace(status=lambda *_args: None),
        data_source=SimpleNamespace(save=lambda _rollout_id: events.append("position")),
        parts=SimpleNamespace(trainers_at_work=nullcontext),
        trainers=SimpleNamespace(save=lambda _rollout_id: events.append("checkpoint")),
        _finish_save=lambda *, patient: None,
        _checkpointed=lambda _rollout_id: None,
    )
    Run.save(run, 0)
    for descriptor in opened:
        os.close(descriptor)
    assert events[:3] == ["position", "journal", "checkpoint"]


def _opened(path: Path, opened: list[int]) -> int:
    opened.append(os.open(path, os.O_RDONLY))
    return opened[-1]
