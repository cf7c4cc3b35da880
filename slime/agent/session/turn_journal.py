"""Turn journal: an SQLite file in the run folder with the turns of unfinished sessions.

A row is a turn. It is written before the client has the last byte of the turn, and deleted when the driver has recorded
the session's samples. After a crash, an attempt whose environment can be resumed continues from its rows.

Invariants: a turn whose `append` has returned is in the file, even if the process dies. Rows that cannot be read, or do
not form a session, end that session and no other. A file that is not a turn journal is set aside and never prevents a
run from starting.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from slime.agent.session.limits import Limits
from slime.agent.session.records import BadRecord
from slime.agent.session.session import Session, Template
from slime.data.buffer.codec import Codec
from slime.data.sample import Sample
from slime.storage.json_types import JsonMapping
from slime.storage.sqlite_store import Change, FileKind, JournalFailed, SqliteStore

logger = logging.getLogger(__name__)

FILE_NAME = "sessions.sqlite"
_SCHEMA = """
CREATE TABLE turns (
    run TEXT NOT NULL, sample INTEGER NOT NULL, group_index INTEGER NOT NULL, attempt INTEGER NOT NULL,
    session TEXT NOT NULL, number INTEGER NOT NULL, record BLOB NOT NULL, digest BLOB NOT NULL,
    PRIMARY KEY (run, sample, group_index, attempt, session, number)
) WITHOUT ROWID;
"""
_KIND = FileKind(
    "the turn journal",
    0x736C7475,  # "sltu"
    1,
    _SCHEMA,
    "SELECT number FROM turns LIMIT 1",
    ("secure_delete=ON",),  # deleted rows do not stay in free pages
)
_OF_ATTEMPT = "run = ? AND sample = ? AND group_index = ? AND attempt = ?"
_NONE = -1


@dataclass(frozen=True)
class Attempt:
    """Key of the turns of one attempt: run, index of the sample and of its group, and number of earlier attempts."""

    run: str
    sample: int | None
    group: int | None
    number: int = 0

    @classmethod
    def of(cls, run: str, sample: Sample, number: int = 0) -> Attempt:
        return cls(run, sample.index, sample.group_index, number)

    @property
    def columns(self) -> tuple[str, int, int, int]:
        group = _NONE if self.group is None else self.group
        return (self.run, _NONE if self.sample is None else self.sample, group, self.number)


class TurnJournal(SqliteStore):
    """Journal of the turns of unfinished sessions."""

    def __init__(self, path: Path) -> None:
        """Create or open the file at `path`."""
        super().__init__(path, _KIND)
        self._codec = Codec()

    async def append(self, key: str, attempt: Attempt, record: JsonMapping) -> None:
        """Write a turn (`Session.turn_record`); it is in the file when this returns. The event loop is not blocked.

        An attempt has one session: the first turn of a new session deletes the turns of the earlier one.
        """
        number = int(record["turn"]["number"])

        def prepare() -> Change:
            content = self._codec.pack(dict(record), f"turn {number} of sample {attempt.sample}")
            digest = _digest(attempt, key, number, content)

            def change(connection: sqlite3.Connection) -> None:
                connection.execute(f"DELETE FROM turns WHERE {_OF_ATTEMPT} AND session != ?", (*attempt.columns, key))
                connection.execute(
                    "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (*attempt.columns, key, number, content, digest),
                )

            return change

        await self.write(prepare)

    async def forget(self, attempt: Attempt) -> None:
        """Delete the turns of an attempt whose samples are recorded elsewhere, or that was given up."""
        await self.execute(f"DELETE FROM turns WHERE {_OF_ATTEMPT}", attempt.columns)

    async def forget_sample(self, run: str, sample: Sample) -> None:
        """Delete the turns of all attempts at a sample."""
        columns = Attempt.of(run, sample).columns[:3]
        await self.execute("DELETE FROM turns WHERE run = ? AND sample = ? AND group_index = ?", columns)

    def forget_other_runs(self, run: str) -> None:
        """Delete the turns that other runs left in this folder."""
        self.drain()
        with self.transaction() as connection:
            connection.execute("DELETE FROM turns WHERE run != ?", (run,))

    def attempts(self, run: str) -> list[Attempt]:
        """Return the attempts of a run that have turns in the journal."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT DISTINCT sample, group_index, attempt FROM turns WHERE run = ? ORDER BY 1, 2, 3", (run,)
            ).fetchall()
        return [Attempt(run, _or_none(sample), _or_none(group), number) for sample, group, number in rows]

    def restore(
        self,
        attempt: Attempt,
        template: Template | None = None,
        *,
        limits: Limits | None = None,
        strict: bool = False,
    ) -> Session | None:
        """Return the session of an unfinished attempt as it was after its last turn; None if it cannot be restored."""
        self.drain()
        try:
            with self.reading() as connection:
                rows = connection.execute(
                    f"SELECT session, number, record, digest FROM turns WHERE {_OF_ATTEMPT} ORDER BY number",
                    attempt.columns,
                ).fetchall()
            if not rows:
                return None
            records: list[JsonMapping] = []
            for session, number, content, digest in rows:
                if not isinstance(content, bytes) or digest != _digest(attempt, str(session), number, content):
                    raise BadRecord(f"the row of turn {number} does not match its digest")
                records.append(self._codec.unpack(content))
            return Session.from_turns(str(rows[0][0]), records, template, limits=limits, strict=strict)
        except (BadRecord, JournalFailed) as error:
            logger.warning("%s: the session of sample %s starts over: %s", self.path, attempt.sample, error)
            return None


def _digest(attempt: Attempt, key: str, number: int, content: bytes) -> bytes:
    """Return the digest of a row, key columns included: a row copied to another key is as invalid as changed bytes."""
    digest = hashlib.blake2b(repr((*attempt.columns, key, number)).encode(), digest_size=16)
    digest.update(content)
    return digest.digest()


def _or_none(value: int) -> int | None:
    return None if value == _NONE else value
