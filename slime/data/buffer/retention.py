"""What stays in the journal to be looked at: samples of the last rollouts, and completions of the last evaluations.

Invariants: nothing here is ever trained on again, and nothing that may be is ever removed here: only groups that a
checkpoint covers, and dropped ones, but none that was in the buffer of a checkpoint that is still there. What is kept
has at most so many bytes (those aside), whole rollouts and evaluations, the oldest of which go first; only one that
alone has more than that is cut. The cost of a call is that of what it adds and removes, not of what is there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from slime.data.buffer.rows import COLUMNS
from slime.data.buffer.schema import NOT_CONSUMED

_REFERRED = "EXISTS (SELECT 1 FROM referred WHERE group_id = groups.id)"
_RELEASED = f"""SELECT id FROM groups WHERE id = ? AND state = 'consumed' AND NOT {_REFERRED}
AND rollout_id NOT IN (SELECT rollout_id FROM kept) AND rollout_id NOT IN (SELECT rollout_id FROM rollouts)"""
_BYTES = "LENGTH(payload) + LENGTH(CAST(prompt AS BLOB)) + LENGTH(CAST(response AS BLOB)) + 100"
_OF_GROUPS = f"""SELECT groups.id, COALESCE(SUM({_BYTES}), 0)
FROM groups LEFT JOIN samples ON group_id = groups.id WHERE rollout_id = ? GROUP BY groups.id"""
_PUT = f"""INSERT INTO evaluated_samples (evaluation_id, {", ".join(COLUMNS)})
VALUES (?, {", ".join("?" * len(COLUMNS))})"""
_ROLLOUTS, _EVALUATIONS = "kept_bytes", "evaluation_bytes"


class Content(Enum):
    """What a journal holds, as far as somebody might miss it."""

    NOTHING = "nothing"
    PAST = "samples to look at"
    WORK = "samples that a run needs to go on"


def content_of(connection: sqlite3.Connection) -> Content:
    """What is in a journal of any format."""
    if connection.execute(
        f"SELECT EXISTS (SELECT 1 FROM groups WHERE state IN {NOT_CONSUMED}) "
        "OR EXISTS (SELECT 1 FROM groups) AND EXISTS (SELECT 1 FROM rollouts)"
    ).fetchone()[0]:
        return Content.WORK
    tables = ("samples", "evaluated_samples") if has_evaluations(connection) else ("samples",)
    found = any(connection.execute(f"SELECT EXISTS (SELECT 1 FROM {table})").fetchone()[0] for table in tables)
    return Content.PAST if found else Content.NOTHING


def has_evaluations(connection: sqlite3.Connection) -> bool:
    """Whether the journal has the tables of evaluations, which format 1 has not."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'evaluations'").fetchone() is not None


def retire(connection: sqlite3.Connection, rollout_id: int, bound: int) -> None:
    """Dropped groups and what rollouts up to `rollout_id` consumed go, but for the last rollouts within `bound`."""
    dropped = connection.execute(f"SELECT id FROM groups WHERE state = 'dropped' AND NOT {_REFERRED}").fetchall()
    _remove_groups(connection, dropped)
    covered = connection.execute("SELECT rollout_id FROM rollouts WHERE rollout_id <= ?", (rollout_id,)).fetchall()
    total = _total(connection, _ROLLOUTS)
    for (rollout,) in covered:
        size = sum(size for _, size in connection.execute(_OF_GROUPS, (rollout,)))
        connection.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (rollout, size))
        total += size
    connection.execute("DELETE FROM rollouts WHERE rollout_id <= ?", (rollout_id,))
    last = connection.execute("SELECT MAX(rollout_id) FROM kept").fetchone()[0]
    while total > bound:
        oldest, size = connection.execute("SELECT rollout_id, bytes FROM kept ORDER BY rollout_id LIMIT 1").fetchone()
        left = _cut(connection, oldest, bound if oldest == last else 0)
        total += left - size
    _set_total(connection, _ROLLOUTS, total)


def refer(connection: sqlite3.Connection, checkpoint: int, row_ids: Iterable[int]) -> None:
    """The data position of a checkpoint names these samples: their groups stay as long as it does."""
    connection.execute("DELETE FROM referred WHERE checkpoint = ?", (checkpoint,))
    connection.executemany(
        "INSERT OR IGNORE INTO referred SELECT ?, group_id FROM samples WHERE id = ?",
        [(checkpoint, row_id) for row_id in row_ids],
    )


def release(connection: sqlite3.Connection, kept: Collection[int]) -> None:
    """Checkpoints other than `kept` are gone: nobody asks for the groups that only they refer to."""
    for checkpoint in _referring(connection):
        if checkpoint not in kept:
            groups = connection.execute("SELECT group_id FROM referred WHERE checkpoint = ?", (checkpoint,)).fetchall()
            connection.execute("DELETE FROM referred WHERE checkpoint = ?", (checkpoint,))
            free = [found for group in groups if (found := connection.execute(_RELEASED, group).fetchone())]
            _remove_groups(connection, free)


def _referring(connection: sqlite3.Connection) -> list[int]:
    """The checkpoints that refer to anything, found by jumping from one to the next."""
    found: list[int] = []
    query = "SELECT MIN(checkpoint) FROM referred WHERE checkpoint > ?"
    while (following := connection.execute(query, (found[-1] if found else -2,)).fetchone()[0]) is not None:
        found.append(int(following))
    return found


def keep_evaluation(
    connection: sqlite3.Connection, step: int, datasets: Mapping[str, Sequence[tuple[Any, ...]]], bound: int | None
) -> None:
    """Put the completions of an evaluation (rows of `COLUMNS`) in the place of those of the same step, if any."""
    total = _total(connection, _EVALUATIONS) - _forget(connection, "step = ?", step)
    for dataset, rows in datasets.items():
        room = None if bound is None else bound // len(datasets)
        taken, size = _fitting(rows, room)
        made = connection.execute(
            "INSERT INTO evaluations (step, dataset, bytes) VALUES (?, ?, ?)", (step, dataset, size)
        )
        connection.executemany(_PUT, [(made.lastrowid, *row) for row in taken])
        total += size
    while bound is not None and total > bound:
        (oldest,) = connection.execute(
            "SELECT id FROM evaluations WHERE step != ? ORDER BY step, id LIMIT 1", (step,)
        ).fetchone()
        total -= _forget(connection, "id = ?", oldest)
    _set_total(connection, _EVALUATIONS, total)


def forget_evaluations_after(connection: sqlite3.Connection, step: int) -> None:
    """A run goes on at `step`: later weights, and what they were evaluated to, are no more."""
    gone = _forget(connection, "step > ?", step)
    if gone:
        _set_total(connection, _EVALUATIONS, _total(connection, _EVALUATIONS) - gone)


def _cut(connection: sqlite3.Connection, rollout: int, room: int) -> int:
    """Remove the groups of a kept rollout after the first ones that have `room` bytes together; the bytes that stay."""
    gone: list[tuple[int]] = []
    left = 0
    query = f"{_OF_GROUPS} ORDER BY position" if room else "SELECT id, 1 FROM groups WHERE rollout_id = ?"
    for group_id, size in connection.execute(query, (rollout,)):  # without room nobody asks how large they are
        if gone or left + size > room:
            gone.append((group_id,))
        else:
            left += size
    is_referred = "SELECT 1 FROM referred WHERE group_id = ?"
    _remove_groups(connection, [group for group in gone if connection.execute(is_referred, group).fetchone() is None])
    if left:
        connection.execute("UPDATE kept SET bytes = ? WHERE rollout_id = ?", (left, rollout))
    else:
        connection.execute("DELETE FROM kept WHERE rollout_id = ?", (rollout,))
    return left


def _remove_groups(connection: sqlite3.Connection, ids: list[tuple[int]]) -> None:
    connection.executemany("DELETE FROM samples WHERE group_id = ?", ids)
    connection.executemany("DELETE FROM groups WHERE id = ?", ids)


def _forget(connection: sqlite3.Connection, where: str, value: int) -> int:
    """Remove evaluations; the bytes they had."""
    found = connection.execute(f"SELECT id, bytes FROM evaluations WHERE {where}", (value,)).fetchall()
    ids = [(row[0],) for row in found]
    connection.executemany("DELETE FROM evaluated_samples WHERE evaluation_id = ?", ids)
    connection.executemany("DELETE FROM evaluations WHERE id = ?", ids)
    return sum(int(row[1]) for row in found)


def _fitting(rows: Iterable[tuple[Any, ...]], room: int | None) -> tuple[list[tuple[Any, ...]], int]:
    """The first rows that have `room` bytes together, and their bytes."""
    taken, total = [], 0
    for row in rows:
        *_, prompt, response, payload = row
        size = len(payload) + len(prompt.encode()) + len(response.encode()) + 100
        if room is not None and total + size > room:
            break
        taken.append(row)
        total += size
    return taken, total


def _total(connection: sqlite3.Connection, key: str) -> int:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return 0 if row is None else int(row[0])


def _set_total(connection: sqlite3.Connection, key: str, total: int) -> None:
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, str(total)))
