"""An SQLite file with one table of rows: creates, recognises and writes it.

Invariants: a transaction is in the file completely or not at all. A file of another kind is renamed, so that it never
prevents a run from starting.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from slime.storage.group_commit import CommitQueue, JournalFailed

logger = logging.getLogger(__name__)

BUSY_S = 30.0


@dataclass(frozen=True)
class RowKind:
    """Identifies the files of one kind; `probe` is a query that such a file answers."""

    what: str
    application_id: int
    format: int
    schema: str
    probe: str


class RowFile:
    """A connection to such a file, usable from several threads; other processes may have theirs."""

    def __init__(self, path: Path, kind: RowKind) -> None:
        """Create or open `path`."""
        self.path, self._kind = path, kind
        self._lock = threading.RLock()
        if path.exists() and not _is_of_kind(kind, path):
            number = 1
            while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
                number += 1
            for suffix in ("", "-wal", "-shm"):
                old = path.with_name(path.name + suffix)
                if old.exists():
                    old.rename(f"{aside}{suffix}")
            logger.warning(
                "%s: not a file of %s that this version of slime can read; renamed it to %s", path, kind.what, aside
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA secure_delete=ON")  # deleted rows do not stay in free pages
            connection.execute("BEGIN IMMEDIATE")
            if not connection.execute("PRAGMA user_version").fetchone()[0]:
                connection.execute(kind.schema)
                connection.execute(f"PRAGMA application_id={kind.application_id}")
                connection.execute(f"PRAGMA user_version={kind.format}")
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._connection = connection
        self._commits = CommitQueue(self)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction: everything written in it is committed, or nothing."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._failed(error) from error
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Write everything that is queued, and close the file. Safe to call again."""
        self._commits.close()
        with self._lock:
            self._connection.close()

    def _failed(self, error: sqlite3.Error) -> JournalFailed:
        return JournalFailed(
            f"{self.path}: {self._kind.what} cannot be written ({error}); make room on that disk if it is full, "
            "and run the same command again"
        )


def _is_of_kind(kind: RowKind, path: Path) -> bool:
    """Return True for a readable file of the kind, and for an empty database that can become one."""
    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=BUSY_S)
        ) as connection:
            known = [
                int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version")
            ]
            if known == [0, 0]:
                return not connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
            connection.execute(kind.probe).fetchone()
            return known == [kind.application_id, kind.format]
    except sqlite3.DatabaseError:
        return False
