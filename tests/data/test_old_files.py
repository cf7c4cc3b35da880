"""Files that an earlier version wrote (`old_files/`, dumped as SQL): the journal, the turn journal, the online queue."""

from __future__ import annotations

import asyncio
import copy
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

from slime.agent.interaction import Exchange, ExchangeStore
from slime.agent.session.turn_journal import Attempt, TurnJournal
from slime.data.buffer.reader import Choice, reading
from tests.agent.byte_template import ByteTemplate, assistant, call, tool, user
from tests.agent.test_session import Talk, base_sample
from tests.data.journal_samples import finish, open_journal, prompts


def restored(folder: Path, name: str) -> Path:
    """Build the database of a dump."""
    path = folder / f"{name}.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.executescript((Path(__file__).parent / "old_files" / f"{name}.sql").read_text())
        connection.execute("PRAGMA journal_mode=WAL")
    return path


def test_journal_resumes_with_every_group(tmp_path: Path) -> None:
    restored(tmp_path, "journal")
    waiting, fan, started = prompts(2), prompts(3), prompts(4, 1)
    waiting[0].metadata = {"tuple": (1, 2), "array": np.arange(3, dtype=np.int16), "big": 2**70, "text": "é" * 300}
    finish(waiting[0], 0.25, tokens=40)
    leaves = [finish(copy.copy(fan[0]), reward) for reward in (0.1, 0.2)]
    finish(started[0], None)
    with reading(str(tmp_path)) as reader:
        shown = list(reader.samples(Choice()))
        assert [(one.state, one.consumed_by, one.sample.index) for one in shown] == [
            ("consumed", 0, 0), ("consumed", 0, 1), ("assigned", None, 2), ("assigned", None, 3), ("partial", None, 4),
            ("partial", None, 5), ("partial", None, 6), ("partial", None, 6), ("partial", None, 7), ("partial", None, 4),
        ]  # fmt: skip
        assert reader.evaluations() == [("sums", [1])]
    journal = open_journal(tmp_path, keep_bytes=10**6)
    recovered = journal.recover(1)
    assert (recovered.position, recovered.batches, recovered.fresh, recovered.unusable) == (
        {"offset": 5},
        [1],
        False,
        [],
    )
    batch = [[finish(sample) for sample in prompts(1)]]
    expected = [waiting, [leaves, fan[1]], started]
    for group, found in zip([*batch, *expected], [*journal.batch(1)[0], *recovered.groups], strict=True):
        flat, flat_found = ([s for m in g for s in (m if isinstance(m, list) else [m])] for g in (group, found))
        for sample, same in zip(flat, flat_found, strict=True):
            np.testing.assert_array_equal(same.metadata.pop("array", 0), sample.metadata.pop("array", 0))
            sample.journal_id = same.journal_id
        assert found == group
    assert journal.position_at(0) == {"offset": 1}
    journal.consumed(1)
    journal.checkpointed(1)
    journal.close()
    assert [file.name for file in tmp_path.iterdir()] == ["journal.sqlite"]


def test_turn_journal_restores_its_sessions(tmp_path: Path) -> None:
    journal = TurnJournal(restored(tmp_path, "sessions"))
    attempts = [Attempt("run", None, None, 2), Attempt("run", 7, 3)]
    assert journal.attempts("run") == attempts
    talk = Talk()
    talk.turn(assistant("", call("a", cmd="ls"), reasoning="hm"))
    talk.turn(assistant("done"), tool("a", "files"))
    for attempt in attempts:
        session = journal.restore(attempt, ByteTemplate())
        assert session is not None
        assert session.samples(base_sample()) == talk.session.samples(base_sample())
    asyncio.run(journal.forget(attempts[1]))
    assert journal.attempts("run") == attempts[:1]
    journal.close()
    assert [file.name for file in tmp_path.iterdir()] == ["sessions.sqlite"]


def test_online_queue_keeps_its_exchanges_and_slots(tmp_path: Path) -> None:
    store = ExchangeStore(restored(tmp_path, "live"))
    ((slot, name),) = store.taken()
    taken = [Exchange.from_record(store.take(number) or {}) for number in (4, 5)]
    assert (slot, name, store.waiting()) == (4, taken[0].id, 1)
    assert [one.question for one in taken] == ["question one", "question two"]
    assert taken[0].followed_by == (user("thanks"),)
    asyncio.run(store.withdraw("conversation three"))
    assert store.waiting() == 0
    store.close()
    assert [file.name for file in tmp_path.iterdir()] == ["live.sqlite"]
