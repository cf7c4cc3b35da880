"""An SQLite file of rows that one noun of a run is kept in: made, recognised, written to.

Invariants: all of a transaction is in the file or nothing. A file that is something else is set aside: it never keeps
a run from starting.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from slime.storage.group_commit import Commits, JournalFailed

logger = logging.getLogger(__name__)

BUSY_S = 30.0


@dataclass(frozen=True)
class RowKind:
    """What tells files of one kind from all others; `probe` is a query that such a file answers."""

    what: str
    application_id: int
    format: int
    schema: str
    probe: str


class RowFile:
    """One process's hands on a file; others may have theirs. Usable from several threads."""

    def __init__(self, path: Path, kind: RowKind) -> None:
        """Make or open `path`."""
        self.path, self._kind = path, kind
        self._lock = threading.RLock()
        if path.exists() and not _is_of(kind, path):
            _set_aside(kind, path)
        try:
            self._connection = self._connected()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._commits = Commits(self)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of what is written inside, or nothing."""
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
        """Write what waits, and give the file back; safe to call again."""
        self._commits.close()
        with self._lock:
            self._connection.close()

    def _connected(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA secure_delete=ON")  # what is forgotten is not left behind in free pages
        connection.execute("BEGIN IMMEDIATE")
        if not connection.execute("PRAGMA user_version").fetchone()[0]:
            connection.execute(self._kind.schema)
            connection.execute(f"PRAGMA application_id={self._kind.application_id}")
            connection.execute(f"PRAGMA user_version={self._kind.format}")
        connection.execute("COMMIT")
        return connection

    def _failed(self, error: sqlite3.Error) -> JournalFailed:
        return JournalFailed(
            f"{self.path}: {self._kind.what} cannot be written ({error}); make room on that disk if it is full, "
            "and run the same command again"
        )


def _is_of(kind: RowKind, path: Path) -> bool:
    """Whether this is a file of the kind that can be read, or an empty one that is going to be one."""
    try:
        with closing(sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            known = [
                int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version")
            ]
            if known == [0, 0]:
                return not connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
            connection.execute(kind.probe).fetchone()
            return known == [kind.application_id, kind.format]
    except sqlite3.DatabaseError:
        return False


def _set_aside(kind: RowKind, path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    for suffix in ("", "-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            beside.rename(f"{aside}{suffix}")
    logger.warning("%s: is no file of %s that this slime can read; it is now %s", path, kind.what, aside)
