"""An SQLite file of one kind: creates, recognises and writes it; queued writes share transactions.

Invariants: a file appears complete or not at all. A transaction is in the file completely or not at all. A write that
was awaited is in the file, or raised. Queued writes happen in the order of their requests; code that writes outside the
queue calls `drain` first if the order matters. An error while a write is prepared fails that write only; a transaction
that fails fails all writes in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from slime.errors import RunFailed
from slime.storage.files import fsync_path

logger = logging.getLogger(__name__)

Change = Callable[[sqlite3.Connection], Callable[[], None] | None]
"""Writes to a connection inside a transaction; returns a function to call after the commit, or None."""

BUSY_S = 30.0
MOST_AT_ONCE = 64
"""Largest number of queued writes in one transaction."""
BESIDE = ("", "-wal", "-shm")
"""Suffixes of the files of a database."""


class JournalFailed(RunFailed):
    """A database of the run can no longer be written; its contents are intact."""


@dataclass(frozen=True)
class FileKind:
    """Identifies the files of one kind, and describes new ones."""

    what: str
    application_id: int
    format: int
    schema: str
    probe: str
    """A query that every such file answers."""
    pragmas: tuple[str, ...]
    """Settings of every connection."""
    pragmas_of_new_files: tuple[str, ...] = ()
    """Settings that are stored in the file."""


@dataclass
class _Write:
    prepare: Callable[[], Change | None]
    loop: asyncio.AbstractEventLoop
    written: asyncio.Future[None]

    def end(self, error: BaseException | None = None) -> None:
        """Resolve the future of the write; do nothing if its event loop is closed."""

        def resolve() -> None:
            if self.written.done():
                return
            if error is None:
                self.written.set_result(None)
            else:
                self.written.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(resolve)
        except RuntimeError:
            return  # the loop is closed


class SqliteStore:
    """A connection to such a file, usable from several threads; other processes may have theirs.

    The thread of the queue starts with the first queued write.
    """

    def __init__(self, path: Path, kind: FileKind) -> None:
        """Create or open `path`."""
        self.path, self.kind = path, kind
        self._lock = threading.RLock()
        self._queue: deque[_Write] = deque()
        self._writing = threading.RLock()
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        with self._readable_errors():
            self._connection = self._opened()

    def _opened(self) -> sqlite3.Connection:
        """Open the file, or a new one if there is none that this store accepts."""
        exists = self.path.exists()
        if not exists or not self._is_usable():
            for suffix in BESIDE:  # SQLite would apply the log of a deleted file to the new one
                if suffix or exists:  # another process may create a missing file now
                    self._beside(suffix).unlink(missing_ok=True)
            self._create()
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        for pragma in ("synchronous=NORMAL", *self.kind.pragmas):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        return connection

    def _is_usable(self) -> bool:
        """True if the existing file is of this kind; one of another kind is renamed, so that the run can start."""
        uri = f"file:{quote(str(self.path.absolute()))}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S)) as connection:
                found = [read_pragma(connection, name) for name in ("application_id", "user_version")]
                if found == [0, 0] and not connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                    return False  # an empty database
                connection.execute(self.kind.probe).fetchone()
                if found == [self.kind.application_id, self.kind.format]:
                    return True
        except sqlite3.DatabaseError:
            pass
        what, aside = self.kind.what, self._set_aside()
        logger.warning("%s: has no %s that this version of slime can read; renamed it to %s", self.path, what, aside)
        return False

    def _fill(self, connection: sqlite3.Connection) -> None:
        """Insert the first rows of a new file."""

    def _create(self) -> None:
        """Create the file under a temporary name, then link it, unless another process has created it by then."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                for pragma in (*self.kind.pragmas_of_new_files, *self.kind.pragmas):
                    connection.execute(f"PRAGMA {pragma}").fetchall()
                connection.executescript(f"BEGIN;{self.kind.schema};COMMIT;")
                self._fill(connection)
                connection.execute(f"PRAGMA application_id={self.kind.application_id}")
                connection.execute(f"PRAGMA user_version={self.kind.format}")
                connection.execute("PRAGMA journal_mode=WAL")
            fsync_path(temporary)
            try:
                os.link(temporary, self.path)
            except FileExistsError:
                return
            except OSError:  # a file system without hard links
                temporary.replace(self.path)
            fsync_path(self.path.parent)
        finally:
            for suffix in (*BESIDE, "-journal"):
                Path(f"{temporary}{suffix}").unlink(missing_ok=True)

    def _set_aside(self) -> Path:
        """Rename the file and SQLite's files next to it to an unused name."""
        number = 1
        while (aside := self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}")).exists():
            number += 1
        for suffix in BESIDE:
            if self._beside(suffix).exists():
                self._beside(suffix).rename(f"{aside}{suffix}")
        return aside

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the body as one transaction; a `JournalFailed` if it cannot be written."""
        with self._lock, self._readable_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection for queries."""
        with self._lock, self._readable_errors():
            yield self._connection

    async def write(self, prepare: Callable[[], Change | None]) -> None:
        """Queue a write and wait until it is in the file, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        one = _Write(prepare, loop, loop.create_future())
        with self._work:
            if self._closed:
                raise RuntimeError(f"{self.kind.what} is closed: nothing more can be recorded")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self.path.stem, daemon=True)
                self._thread.start()
            self._queue.append(one)
            self._work.notify()
        await one.written

    async def execute(self, statement: str, values: tuple[str | int, ...]) -> None:
        """Queue one statement and wait until it is in the file."""

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(statement, values)

        await self.write(lambda: change)

    def drain(self) -> None:
        """Write everything that is queued."""
        with self._writing:
            while self._queue:
                self._commit_next()

    def close(self) -> None:
        """Write everything that is queued, and close the file. Safe to call again."""
        with self._work:
            self._closed = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
        self.drain()
        with self._lock:
            self._connection.close()

    def _serve(self) -> None:
        while True:
            with self._work:
                while not self._queue and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
            with self._writing:
                self._commit_next()

    def _commit_next(self) -> None:
        """Commit the oldest queued writes in one transaction; call it with `_writing` held."""
        ready: list[tuple[_Write, Change]] = []
        with self._work:
            batch = [self._queue.popleft() for _ in range(min(MOST_AT_ONCE, len(self._queue)))]
        for one in batch:
            try:
                change = one.prepare()
            except Exception as error:  # noqa: BLE001 - it is raised where the write is awaited
                one.end(error)
                continue
            if change is None:
                one.end()
            else:
                ready.append((one, change))
        if not ready:
            return
        try:
            with self.transaction() as connection:
                done = [change(connection) for _, change in ready]
        except Exception as error:  # noqa: BLE001 - it is raised where the writes are awaited
            for one, _ in ready:
                one.end(error)
            return
        for (one, _), after in zip(ready, done, strict=True):
            try:
                if after is not None:
                    after()
            except Exception as error:  # noqa: BLE001 - it is raised where the write is awaited
                one.end(error)
            else:
                one.end()

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._cannot_write(str(error)) from error

    def _cannot_write(self, reason: str) -> JournalFailed:
        return JournalFailed(
            f"{self.path}: {self.kind.what} cannot be written ({reason}); everything recorded so far is intact: make "
            "room on that disk if it is full, and run the same command again"
        )


def read_pragma(connection: sqlite3.Connection, name: str) -> int:
    """Return the value of a setting of a database."""
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
