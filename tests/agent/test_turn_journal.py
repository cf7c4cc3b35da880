from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from slime.agent.session.tree import MatchOutcome
from slime.agent.session.turn_journal import Attempt, TurnJournal
from slime.storage.sqlite_store import JournalFailed
from tests.agent.byte_template import ByteTemplate, assistant, call, tool, user
from tests.agent.test_session import Talk, base_sample

OURS = Attempt("run", 7, 3)
WRITER = """
import asyncio, sys
from pathlib import Path
from slime.agent.session.turn_journal import Attempt, TurnJournal
from tests.agent.byte_template import assistant, user
from tests.agent.test_session import Talk

async def write() -> None:
    journal, talk = TurnJournal(Path(sys.argv[1])), Talk()
    for number in range(100_000):
        turn = talk.turn(assistant(f"answer {number}"), user(f"question {number}"))
        await journal.append("key", Attempt("run", 7, 3), talk.session.turn_record(turn))
        print(number, flush=True)

asyncio.run(write())
"""


def talk_of(*answers: str, journal: TurnJournal, attempt: Attempt = OURS, key: str = "key") -> Talk:
    talk = Talk()
    for answer in answers:
        turn = talk.turn(assistant(answer), user(f"say {answer}"))
        asyncio.run(journal.append(key, attempt, talk.session.turn_record(turn)))
    return talk


def damage_rows(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement, values).rowcount


def test_session_resumes_from_the_turns_of_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "sessions.sqlite"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        seen = [int(writer.stdout.readline()) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        seen += [int(line) for line in writer.stdout]
    journal = TurnJournal(path)
    session = journal.restore(OURS, ByteTemplate())
    assert session is not None
    assert session.key == "key"
    turns = list(session.tree.turns.values())
    assert len(turns) in (len(seen), len(seen) + 1)  # the last one may be written but not printed
    assert [turn.message.content for turn in turns] == [f"answer {number}" for number in range(len(turns))]
    talk = Talk()
    talk.session, talk.messages = session, session.messages(turns[-1])
    talk.turn(assistant("", call("a")), user("still there?"))
    talk.turn(assistant("done"), tool("a", "x"))
    assert talk.outcomes == [MatchOutcome.EXTENDED] * 2
    (sample,) = session.samples(base_sample())
    assert sample.metadata["session"]["turns"] == len(turns) + 2
    assert sample.metadata["session"]["retokenised_tokens"] == 0
    journal.close()


def test_forget_deletes_only_the_rows_of_its_attempts(tmp_path: Path) -> None:
    journal = TurnJournal(tmp_path / "sessions.sqlite")
    others = [Attempt("run", 7, 3, 1), Attempt("run", 8, 3), Attempt("run", None, None)]
    for attempt in (OURS, *others):
        talk_of("one", "two", journal=journal, attempt=attempt)
    talk_of("one", journal=journal, attempt=Attempt("old run", 7, 3))
    asyncio.run(journal.forget(OURS))
    assert journal.restore(OURS) is None
    assert journal.attempts("run") == [others[2], others[0], others[1]]
    asyncio.run(journal.forget_sample("run", base_sample()))
    assert journal.attempts("run") == [others[2], others[1]]
    journal.forget_other_runs("run")
    assert journal.attempts("old run") == []
    journal.close()


def test_restarted_attempt_has_only_its_new_turns(tmp_path: Path) -> None:
    journal = TurnJournal(tmp_path / "sessions.sqlite")
    talk_of("one", "two", journal=journal)
    again = talk_of("three", journal=journal, key="another key")
    session = journal.restore(OURS)
    assert session is not None
    assert session.key == "another key"
    assert session.samples(base_sample()) == again.session.samples(base_sample())
    journal.close()


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("UPDATE turns SET record = ? WHERE sample = 7 AND number = 1", b"torn"),
        ("UPDATE turns SET record = ? WHERE sample = 7 AND number = 1", "a text"),
        ("DELETE FROM turns WHERE sample = 7 AND number = 1 AND session = ?", "key"),
        ("UPDATE turns SET attempt = ? WHERE sample = 8", 0),
    ],
    ids=["other bytes", "no bytes", "a missing turn", "rows of another"],
)
def test_damaged_rows_drop_only_their_session(
    tmp_path: Path, statement: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sessions.sqlite"
    journal = TurnJournal(path)
    moved = Attempt("run", 8, 3, 1)
    talk_of("one", "two", "three", journal=journal)
    talk_of("one", "two", journal=journal, attempt=moved)
    healthy = Attempt("run", 9, 3)
    talk = talk_of("one", "two", journal=journal, attempt=healthy)
    damage_rows(path, statement, value)
    hurt = Attempt("run", 8, 3, 0) if "sample = 8" in statement else OURS
    assert journal.restore(hurt) is None
    assert "starts over" in caplog.text
    session = journal.restore(healthy)
    assert session is not None
    assert session.samples(base_sample()) == talk.session.samples(base_sample())
    talk_of("again", journal=journal, attempt=hurt, key="fresh")
    assert journal.restore(hurt) is not None
    journal.close()


def test_foreign_or_newer_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "sessions.sqlite"
    path.write_bytes(b"no database" * 500)
    journal = TurnJournal(path)
    talk_of("one", journal=journal)
    assert journal.restore(OURS) is not None
    journal.close()
    assert (tmp_path / "sessions-1.sqlite").read_bytes() == b"no database" * 500
    assert "renamed it to" in caplog.text
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version=9")
    journal = TurnJournal(path)
    assert journal.restore(OURS) is None
    assert (tmp_path / "sessions-2.sqlite").exists()
    journal.close()


@pytest.mark.parametrize("folder", ["run", "run #1?mode=rw%20"])
def test_two_journals_may_share_one_file(tmp_path: Path, folder: str) -> None:
    server, driver = (TurnJournal(tmp_path / folder / "sessions.sqlite") for _ in range(2))
    talk_of("one", journal=server)
    assert driver.restore(OURS) is not None
    asyncio.run(driver.forget(OURS))
    assert server.restore(OURS) is None
    server.close()
    driver.close()
    assert [file.name for file in tmp_path.iterdir()] == [folder]


def test_file_that_another_process_creates_at_the_same_time_is_shared(tmp_path: Path) -> None:
    class Slow(TurnJournal):
        def _fill(self, connection: sqlite3.Connection) -> None:
            other = TurnJournal(tmp_path / "sessions.sqlite")
            talk_of("one", journal=other)
            other.close()

    journal = Slow(tmp_path / "sessions.sqlite")
    assert journal.restore(OURS) is not None
    journal.close()
    assert [file.name for file in tmp_path.iterdir()] == ["sessions.sqlite"]


def test_failed_write_raises_journal_failed(tmp_path: Path) -> None:
    journal = TurnJournal(tmp_path / "sessions.sqlite")
    with closing(sqlite3.connect(journal.path)) as connection:
        connection.execute("DROP TABLE turns")
    with pytest.raises(JournalFailed, match="cannot be written"):
        talk_of("one", journal=journal)
    journal.close()
