"""Retention of samples for inspection: those of the last rollouts and the completions of the last evaluations.

Invariants: retained samples are never trained on again, and samples that may still be trained on are never removed.
Only dropped groups and groups covered by a checkpoint are removed, except those that were in the buffer of an existing
checkpoint. Apart from these exceptions, retained data is limited in bytes; whole rollouts and evaluations are removed,
oldest first, and only a single one above the limit is truncated. The cost of a call depends on what it adds and
removes, not on the size of the journal.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence

from slime.data.buffer.rows import COLUMNS

_REFERRED = "EXISTS (SELECT 1 FROM referred WHERE group_id = groups.id)"
_RELEASED = f"""SELECT id FROM groups WHERE id = ? AND state = 'consumed' AND NOT {_REFERRED}
AND rollout_id NOT IN (SELECT rollout_id FROM kept) AND rollout_id NOT IN (SELECT rollout_id FROM rollouts)"""
_BYTES = "LENGTH(payload) + LENGTH(CAST(prompt AS BLOB)) + LENGTH(CAST(response AS BLOB)) + 100"
_OF_GROUPS = f"""SELECT groups.id, COALESCE(SUM({_BYTES}), 0)
FROM groups LEFT JOIN samples ON group_id = groups.id WHERE rollout_id = ? GROUP BY groups.id"""
_PUT = f"""INSERT INTO evaluated_samples (evaluation_id, {", ".join(COLUMNS)})
VALUES (?, {", ".join("?" * len(COLUMNS))})"""
_ROLLOUTS, _EVALUATIONS = "kept_bytes", "evaluation_bytes"


def prune_consumed(connection: sqlite3.Connection, rollout_id: int, bound: int) -> None:
    """Remove dropped groups and groups consumed up to `rollout_id`, except the last rollouts within `bound` bytes."""
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


def release(connection: sqlite3.Connection, kept: Collection[int]) -> None:
    """Remove the groups that only checkpoints other than `kept` refer to; those checkpoints no longer exist."""
    checkpoints: list[int] = []  # those with references; one index lookup finds the next
    query = "SELECT MIN(checkpoint) FROM referred WHERE checkpoint > ?"
    while (following := connection.execute(query, (checkpoints[-1] if checkpoints else -2,)).fetchone()[0]) is not None:
        checkpoints.append(int(following))
    for checkpoint in checkpoints:
        if checkpoint not in kept:
            groups = connection.execute("SELECT group_id FROM referred WHERE checkpoint = ?", (checkpoint,)).fetchall()
            connection.execute("DELETE FROM referred WHERE checkpoint = ?", (checkpoint,))
            free = [found for group in groups if (found := connection.execute(_RELEASED, group).fetchone())]
            _remove_groups(connection, free)


def keep_evaluation(
    connection: sqlite3.Connection, step: int, datasets: Mapping[str, Sequence[tuple]], bound: int | None
) -> None:
    """Store the completions of an evaluation (rows of `COLUMNS`); they replace those of the same step.

    Of each dataset the first rows within its share of `bound` bytes are stored.
    """
    total = _total(connection, _EVALUATIONS) - _forget(connection, "step = ?", step)
    for dataset, rows in datasets.items():
        room = None if bound is None else bound // len(datasets)
        taken, size = [], 0
        for row in rows:
            *_, prompt, response, payload = row
            row_bytes = len(payload) + len(prompt.encode()) + len(response.encode()) + 100
            if room is not None and size + row_bytes > room:
                break
            taken.append(row)
            size += row_bytes
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
    """Remove the evaluations of weights after `step`, the step at which a run resumes."""
    gone = _forget(connection, "step > ?", step)
    if gone:
        _set_total(connection, _EVALUATIONS, _total(connection, _EVALUATIONS) - gone)


def _cut(connection: sqlite3.Connection, rollout: int, room: int) -> int:
    """Truncate a retained rollout to its first groups within `room` bytes; returns the bytes that remain."""
    gone: list[tuple[int]] = []
    left = 0
    query = f"{_OF_GROUPS} ORDER BY position" if room else "SELECT id, 1 FROM groups WHERE rollout_id = ?"
    for group_id, size in connection.execute(query, (rollout,)):  # without room their sizes are not needed
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
    """Remove evaluations and return their size in bytes."""
    found = connection.execute(f"SELECT id, bytes FROM evaluations WHERE {where}", (value,)).fetchall()
    ids = [(row[0],) for row in found]
    connection.executemany("DELETE FROM evaluated_samples WHERE evaluation_id = ?", ids)
    connection.executemany("DELETE FROM evaluations WHERE id = ?", ids)
    return sum(int(row[1]) for row in found)


def _total(connection: sqlite3.Connection, key: str) -> int:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return 0 if row is None else int(row[0])


def _set_total(connection: sqlite3.Connection, key: str, total: int) -> None:
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, str(total)))
