"""The SQLite file of the journal: atomic creation, ownership check, and transactions.

Invariants: a journal file appears complete or not at all. A rejected file stays unchanged, and no files are left next
to it. A transaction that fails (for example on a full disk) is rolled back: earlier records remain.
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

from slime.config.plugins import present_path
from slime.data.buffer.retention import JournalContents, classify_contents
from slime.data.buffer.schema import APPLICATION_ID, FORMAT, REFERRED, SCHEMA, TO_LOOK_AT
from slime.data.source_state import fsync_file
from slime.errors import UserError
from slime.storage.group_commit import JournalFailed

logger = logging.getLogger(__name__)

_BUSY_S = 30.0
_WAL_PAGES = 16384
"""Pages (of 4 KiB) in the write-ahead log before a checkpoint moves them into the file."""
_VACUUM_FROM_PAGES = 4096


class Database:
    """A write connection to the journal file, shared by threads."""

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        """Create or open `path`; a `UserError` if it is not a journal, or the journal of a run with another identity.

        Another run's journal is rejected only if that run still needs its samples. A journal with only samples for
        inspection is renamed, and an empty one is replaced.
        """
        self.path = path
        self._identity = dict(identity)
        self._lock = threading.RLock()
        if not path.exists() or not self._is_ours():
            self._make()
        self._connection = self._connected()
        with self._lock, self._readable_errors():
            found = self._pragma("user_version")
            if found < FORMAT:  # upgrade a journal of an earlier format
                added = (TO_LOOK_AT if found < 2 else "") + REFERRED
                self._connection.executescript(f"BEGIN;{added}PRAGMA user_version={FORMAT};COMMIT;")

    def close(self) -> None:
        """Close the file; safe to call again."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the body as one transaction; a `JournalFailed` if it cannot be written."""
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
        """Provide the connection for queries."""
        with self._lock, self._readable_errors():
            yield self._connection

    def sync(self) -> None:
        """Flush all records to disk, so that they survive a power loss, and release large amounts of free space."""
        with self._lock, self._readable_errors():
            pages, free = (self._pragma(name) for name in ("page_count", "freelist_count"))
            if free > _VACUUM_FROM_PAGES and 2 * free > pages:
                # `executescript`, because `execute` runs only the first step, which frees one page
                self._connection.executescript(f"PRAGMA incremental_vacuum({free - pages // 4})")
            try:
                wal = os.open(self._beside("-wal"), os.O_RDONLY)
            except FileNotFoundError:
                wal = -1  # the log is empty
            if wal >= 0:
                try:
                    os.fsync(wal)
                except OSError as error:
                    raise self._cannot_write(error.strerror or str(error)) from error
                finally:
                    os.close(wal)
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def start_new_file(self, *, keep_old: bool) -> Path | None:
        """Replace the journal with an empty one; returns the new path of the old one if it is kept."""
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
        """Rename the file and SQLite's files next to it to an unused name."""
        number = 1
        while (aside := self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}")).exists():
            number += 1
        for suffix in ("", "-wal", "-shm"):
            if self._beside(suffix).exists():
                self._beside(suffix).rename(f"{aside}{suffix}")
        return aside

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit={_WAL_PAGES * 4096}")
        return connection

    def _make(self) -> None:
        """Create the empty journal under a temporary name, then rename it.

        Sample ids start at a random number, so that ids of two journals do not collide.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        try:
            with self._readable_errors(), closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
                connection.executescript(f"BEGIN;{SCHEMA}COMMIT;")
                connection.executemany("INSERT INTO identity VALUES (?, ?)", self._identity.items())
                first_id = (1 + secrets.randbelow(2**31)) << 20
                connection.execute("INSERT INTO sqlite_sequence VALUES ('samples', ?)", (first_id,))
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version={FORMAT}")
                connection.execute("PRAGMA journal_mode=WAL")
            for suffix in ("-wal", "-shm"):  # of a deleted file: SQLite would apply them to the new one
                self._beside(suffix).unlink(missing_ok=True)
            fsync_file(temporary)
            temporary.replace(self.path)
            fsync_file(self.path.parent)
        finally:
            for suffix in ("", "-wal", "-shm", "-journal"):
                Path(f"{temporary}{suffix}").unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        """True if the file belongs to this run; False if it may be replaced; else a `UserError`."""
        remedy = "choose another --output-dir, or move the file away to start a new one"
        with open_read_only(self.path) as connection:
            found = {n: present_path(value) for n, value in connection.execute("SELECT name, value FROM identity")}
            content = classify_contents(connection)
        differing = [
            f"{name} ({found.get(name, 'none')} there, {self._identity.get(name, 'none')} here)"
            for name in sorted(found.keys() | self._identity.keys())
            if found.get(name) != self._identity.get(name)
        ]
        if differing and content is JournalContents.WORK:
            raise UserError(
                f"{self.path}: is the journal of another run, it differs in {'; '.join(differing)}: {remedy}"
            )
        if differing and content is JournalContents.PAST:
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


@contextmanager
def open_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a journal for reading, also during a run; a `UserError` if it is not a journal or has a newer format.

    A file without a write-ahead log is not in use. It is opened as immutable, because SQLite would otherwise create a
    log that a reader cannot remove.
    """
    shared_memory = path.with_name(path.name + "-shm")
    had_shared_memory = shared_memory.exists()
    live = path.with_name(path.name + "-wal").exists()
    uri = f"file:{quote(str(path.absolute()))}?{'mode=ro' if live else 'immutable=1'}"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)) as connection:
            application, version = (
                int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("application_id", "user_version")
            )
            if application != APPLICATION_ID:
                raise UserError(
                    f"{path}: is an SQLite database, but not a journal of slime; move it away, or choose another "
                    "--output-dir"
                )
            if version > FORMAT:
                raise UserError(
                    f"{path}: has format {version}, but this version supports formats up to {FORMAT}; use the version "
                    "of slime that wrote it, or choose another --output-dir"
                )
            connection.execute("SELECT COUNT(*) FROM identity").fetchone()
            pages, size = (
                int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size")
            )
            if not live and path.stat().st_size < pages * size:  # SQLite does not detect a truncated last page
                raise sqlite3.DatabaseError("the file is truncated")
            yield connection
    except sqlite3.Error as error:
        raise UserError(
            f"{path}: not a readable journal ({error}); move it away, or choose another --output-dir"
        ) from error
    finally:
        if live and not had_shared_memory:
            shared_memory.unlink(missing_ok=True)
