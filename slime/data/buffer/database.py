"""The SQLite file of the journal: made whole, opened only when it is ours, written in transactions.

Invariants: a journal file appears complete or not at all. A file that is refused is not changed by a byte, and nothing
is left beside it. A transaction that fails, for want of disk space say, is rolled back: what was recorded before it
stays.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from slime.data.buffer.retention import Content, content_of
from slime.data.buffer.schema import APPLICATION_ID, FORMAT, REFERRED, SCHEMA, TO_LOOK_AT
from slime.data.source_state import fsync_file
from slime.errors import UserError
from slime.storage.group_commit import JournalFailed

logger = logging.getLogger(__name__)

_BUSY_S = 30.0
_WAL_PAGES = 16384
"""Pages (of 4 KiB) that the write-ahead log gathers before they are moved into the file."""
_VACUUM_FROM_PAGES = 4096


class Database:
    """One connection for writing, shared by threads."""

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        """Make or open `path`; a `UserError` when it is no journal, or another one than that of `identity`.

        Another run's journal is refused only for what is not trained on and saved yet: one that has merely samples to
        look at is set aside, and an empty one replaced.
        """
        self.path = path
        self._identity = dict(identity)
        self._lock = threading.RLock()
        if not path.exists() or not self._is_ours():
            self._make()
        self._connection = self._connected()
        self._upgrade()

    def close(self) -> None:
        """Give the file back; safe to call again."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of what is written inside, or nothing; a `JournalFailed` when it cannot be written."""
        with self._lock, self._readable_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for queries."""
        with self._lock, self._readable_errors():
            yield self._connection

    def sync(self) -> None:
        """Make everything recorded so far survive a power cut, and give much free space back to the disk."""
        with self._lock, self._readable_errors():
            pages, free = (self._pragma(name) for name in ("page_count", "freelist_count"))
            if free > _VACUUM_FROM_PAGES and 2 * free > pages:
                # a script, because `execute` takes the first of its steps, which is one page, for the whole
                self._connection.executescript(f"PRAGMA incremental_vacuum({free - pages // 4})")
            try:
                wal = os.open(self._beside("-wal"), os.O_RDONLY)
            except FileNotFoundError:
                wal = -1  # nothing is waiting in the log
            if wal >= 0:
                try:
                    os.fsync(wal)
                except OSError as error:
                    raise self._cannot_write(error.strerror or str(error)) from error
                finally:
                    os.close(wal)
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def begin_anew(self, *, keep_old: bool) -> Path | None:
        """Put an empty journal in the place of this one; where the old one went, if it is kept."""
        with self._lock, self._readable_errors():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.close()
            aside = self._set_aside() if keep_old else None
            for suffix in ("", "-wal", "-shm"):
                self._beside(suffix).unlink(missing_ok=True)
            self._make()
            self._connection = self._connected()
            return aside

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _set_aside(self) -> Path:
        """Give the file, and what SQLite has beside it, another name."""
        aside = self._unused_name()
        for suffix in ("", "-wal", "-shm"):
            if self._beside(suffix).exists():
                self._beside(suffix).rename(f"{aside}{suffix}")
        return aside

    def _unused_name(self) -> Path:
        number = 1
        while (name := self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}")).exists():
            number += 1
        return name

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit={_WAL_PAGES * 4096}")
        return connection

    def _make(self) -> None:
        """Write the empty journal beside its name, then rename it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        try:
            with self._readable_errors(), closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
                connection.executescript(f"BEGIN;{SCHEMA}COMMIT;")
                connection.executemany("INSERT INTO identity VALUES (?, ?)", self._identity.items())
                connection.execute("INSERT INTO sqlite_sequence VALUES ('samples', ?)", (_first_id(),))
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version={FORMAT}")
                connection.execute("PRAGMA journal_mode=WAL")
            for suffix in ("-wal", "-shm"):  # of a file that is gone: SQLite would apply it to the new one
                self._beside(suffix).unlink(missing_ok=True)
            fsync_file(temporary)
            temporary.replace(self.path)
            fsync_file(self.path.parent)
        finally:
            for suffix in ("", "-wal", "-shm", "-journal"):
                Path(f"{temporary}{suffix}").unlink(missing_ok=True)

    def _upgrade(self) -> None:
        """Bring a journal of an earlier format to this one."""
        with self._lock, self._readable_errors():
            found = self._pragma("user_version")
            if found < FORMAT:
                added = (TO_LOOK_AT if found < 2 else "") + REFERRED
                self._connection.executescript(f"BEGIN;{added}PRAGMA user_version={FORMAT};COMMIT;")

    def _is_ours(self) -> bool:
        """Whether the file belongs to this run; False when a new one may take its place."""
        remedy = "choose another --output-dir, or move the file away to begin a new one"
        with open_read_only(self.path) as connection:
            found = dict(connection.execute("SELECT name, value FROM identity"))
            content = content_of(connection)
        differing = [
            f"{name} ({found.get(name, 'none')} there, {self._identity.get(name, 'none')} here)"
            for name in sorted(found.keys() | self._identity.keys())
            if found.get(name) != self._identity.get(name)
        ]
        if differing and content is Content.WORK:
            raise UserError(
                f"{self.path}: is the journal of another run, it differs in {'; '.join(differing)}: {remedy}"
            )
        if differing and content is Content.PAST:
            logger.warning("%s: the samples of another run are now in %s", self.path, self._set_aside())
        return not differing

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._cannot_write(str(error)) from error

    def _cannot_write(self, reason: str) -> JournalFailed:
        return JournalFailed(
            f"{self.path}: the journal cannot be written ({reason}); everything recorded so far is intact: make room "
            "on that disk if it is full, and run the same command again"
        )


def _first_id() -> int:
    """Sample ids of two journals never meet: a sample that another journal recorded is not taken for one of this."""
    return (1 + secrets.randbelow(2**31)) << 20


@contextmanager
def open_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """A journal for reading, also while a run writes it; a `UserError` when it is none, or of a newer format.

    Without a write-ahead log beside it nobody has the file open: it is read as it stands, since SQLite would make such
    a log and a reader could not remove it.
    """
    shared_memory = path.with_name(path.name + "-shm")
    had_shared_memory = shared_memory.exists()
    live = path.with_name(path.name + "-wal").exists()
    uri = f"file:{quote(str(path.absolute()))}?{'mode=ro' if live else 'immutable=1'}"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)) as connection:
            _check_format(path, connection)
            connection.execute("SELECT COUNT(*) FROM identity").fetchone()
            pages, size = (
                int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size")
            )
            if not live and path.stat().st_size < pages * size:  # SQLite overlooks a missing part of the last page
                raise sqlite3.DatabaseError("the file is cut off")
            yield connection
    except sqlite3.Error as error:
        raise UserError(
            f"{path}: is no readable journal ({error}); move it away, or choose another --output-dir"
        ) from error
    finally:
        if live and not had_shared_memory:
            shared_memory.unlink(missing_ok=True)


def _check_format(path: Path, connection: sqlite3.Connection) -> None:
    application, version = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version")
    )
    if application != APPLICATION_ID:
        raise UserError(
            f"{path}: is an SQLite database, but no journal of slime; move it away, or choose another --output-dir"
        )
    if version > FORMAT:
        raise UserError(
            f"{path}: has format {version}, and this slime knows formats up to {FORMAT}; use the slime that wrote it, "
            "or choose another --output-dir"
        )
