"""The SQLite file of the journal: schema, ownership check, upgrades, and read-only access.

Invariants: plain SQL is enough to find a sample, its text, its reward and its state. `FORMAT` changes with every change
of the schema or the payload; the table `identity` is written once, when the file is created. A rejected file stays
unchanged, and no files are left next to it.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from enum import Enum
from pathlib import Path
from urllib.parse import quote

from slime.config.plugins import present_path
from slime.errors import UserError
from slime.storage.sqlite_store import BUSY_S, FileKind, SqliteStore, read_pragma

logger = logging.getLogger(__name__)

FORMAT = 4
APPLICATION_ID = 0x736C6D65  # "slme": distinguishes a journal from other SQLite databases

OPEN = ("pending", "partial", "finished")
"""States of a group that was handed out but is not in a batch: after a crash it returns to the data source."""
STATES = (*OPEN, "assigned", "consumed", "dropped")
NOT_CONSUMED = tuple(state for state in STATES if state != "consumed")

RECORD = """
CREATE TABLE identity (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    group_index INTEGER,
    state TEXT NOT NULL CHECK (state IN ('pending', 'partial', 'finished', 'assigned', 'consumed', 'dropped')),
    rollout_id INTEGER,
    position INTEGER,
    consumed_by INTEGER
);
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_rollout ON groups (rollout_id, position) WHERE rollout_id IS NOT NULL;
CREATE TABLE samples (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    group_id INTEGER NOT NULL REFERENCES groups (id),
    member INTEGER,
    leaf INTEGER,
    sample_index INTEGER,
    status TEXT NOT NULL,
    reward REAL,
    response_length INTEGER,
    weight_versions TEXT NOT NULL,
    prompt TEXT NOT NULL,
    response TEXT NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX samples_by_group ON samples (group_id);
CREATE TABLE rollouts (
    rollout_id INTEGER PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('assigned', 'consumed')),
    metrics TEXT NOT NULL
);
CREATE TABLE positions (rollout_id INTEGER PRIMARY KEY, position TEXT NOT NULL);
CREATE VIEW trajectories AS
    SELECT samples.id, sample_index, group_index, state, rollout_id, consumed_by, status, reward, response_length,
           weight_versions, prompt, response
    FROM samples JOIN groups ON groups.id = samples.group_id;
CREATE VIEW finished AS
    SELECT * FROM trajectories WHERE state IN ('finished', 'assigned', 'consumed');
"""

TO_LOOK_AT = """
CREATE TABLE kept (rollout_id INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    dataset TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    UNIQUE (step, dataset)
);
CREATE TABLE evaluated_samples (
    id INTEGER PRIMARY KEY,
    evaluation_id INTEGER NOT NULL REFERENCES evaluations (id),
    sample_index INTEGER,
    status TEXT NOT NULL,
    reward REAL,
    response_length INTEGER,
    weight_versions TEXT NOT NULL,
    prompt TEXT NOT NULL,
    response TEXT NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX evaluated_samples_by_evaluation ON evaluated_samples (evaluation_id);
CREATE VIEW evaluated AS
    SELECT evaluated_samples.id, step, dataset, sample_index, status, reward, response_length, weight_versions, prompt,
           response
    FROM evaluated_samples JOIN evaluations ON evaluations.id = evaluation_id;
"""
"""Added in format 2: the retained consumed rollouts, and the completions of evaluations."""

# Format 3 adds the sample status `generated`; its tables are those of format 2.

REFERRED = """
CREATE TABLE referred (
    checkpoint INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    PRIMARY KEY (checkpoint, group_id)
) WITHOUT ROWID;
CREATE INDEX referred_by_group ON referred (group_id);
"""
"""Added in format 4: the buffered groups that the data position of a checkpoint refers to."""
_WAL_PAGES = 16384
"""Pages (of 4 KiB) in the write-ahead log before a checkpoint moves them into the file."""
_VACUUM_FROM_PAGES = 4096
_KIND = FileKind(
    "the journal",
    APPLICATION_ID,
    FORMAT,
    RECORD + TO_LOOK_AT + REFERRED,
    "SELECT COUNT(*) FROM identity",
    (f"wal_autocheckpoint={_WAL_PAGES}", f"journal_size_limit={_WAL_PAGES * 4096}"),
    ("auto_vacuum=INCREMENTAL",),
)


class JournalContents(Enum):
    """The kinds of data in a journal, by the loss if it were deleted."""

    NOTHING = "nothing"
    PAST = "samples for inspection"
    WORK = "samples that a restart needs"


class Database(SqliteStore):
    """A write connection to the journal of the run with this identity, shared by threads."""

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        """Create or open `path`; a `UserError` if it is not a journal, or the journal of a run with another identity.

        Another run's journal is rejected only if that run still needs its samples. A journal with only samples for
        inspection is renamed, and an empty one is replaced.
        """
        self._identity = dict(identity)
        super().__init__(path, _KIND)
        with self.reading() as connection:
            found = read_pragma(connection, "user_version")
            if found < FORMAT:  # upgrade a journal of an earlier format
                added = (TO_LOOK_AT if found < 2 else "") + REFERRED
                connection.executescript(f"BEGIN;{added}PRAGMA user_version={FORMAT};COMMIT;")

    def sync(self) -> None:
        """Flush all records to disk, so that they survive a power loss, and release large amounts of free space."""
        self.drain()
        with self.reading() as connection:
            pages, free = (read_pragma(connection, name) for name in ("page_count", "freelist_count"))
            if free > _VACUUM_FROM_PAGES and 2 * free > pages:
                # `executescript`, because `execute` runs only the first step, which frees one page
                connection.executescript(f"PRAGMA incremental_vacuum({free - pages // 4})")
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
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def start_new_file(self, *, keep_old: bool) -> Path | None:
        """Replace the journal with an empty one; returns the new path of the old one if it is kept."""
        with self.reading() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            connection.close()
            aside = self._set_aside() if keep_old else None
            self.path.unlink(missing_ok=True)
            self._connection = self._opened()
            return aside

    def _fill(self, connection: sqlite3.Connection) -> None:
        """Insert the identity; sample ids start at a random number, so that ids of two journals do not collide."""
        connection.executemany("INSERT INTO identity VALUES (?, ?)", self._identity.items())
        first_id = (1 + secrets.randbelow(2**31)) << 20
        connection.execute("INSERT INTO sqlite_sequence VALUES ('samples', ?)", (first_id,))

    def _is_usable(self) -> bool:
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
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)) as connection:
            application, version = (read_pragma(connection, name) for name in ("application_id", "user_version"))
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
            connection.execute(_KIND.probe).fetchone()
            pages, size = (read_pragma(connection, name) for name in ("page_count", "page_size"))
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


def classify_contents(connection: sqlite3.Connection) -> JournalContents:
    """Classify the contents of a journal of any format."""
    if connection.execute(
        f"SELECT EXISTS (SELECT 1 FROM groups WHERE state IN {NOT_CONSUMED}) "
        "OR EXISTS (SELECT 1 FROM groups) AND EXISTS (SELECT 1 FROM rollouts)"
    ).fetchone()[0]:
        return JournalContents.WORK
    tables = ("samples", "evaluated_samples") if has_evaluations(connection) else ("samples",)
    found = any(connection.execute(f"SELECT EXISTS (SELECT 1 FROM {table})").fetchone()[0] for table in tables)
    return JournalContents.PAST if found else JournalContents.NOTHING


def has_evaluations(connection: sqlite3.Connection) -> bool:
    """True if the journal has the tables of evaluations, which format 1 lacks."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'evaluations'").fetchone() is not None
