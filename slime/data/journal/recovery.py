"""What a restart finds in the journal.

Invariant: the trainers go on at rollout `start`, so what earlier rollouts consumed stays consumed; batches of `start`
and later ones are trained on again, group by group as they were, whether or not that happened before; what was handed
out and is in no batch goes back to the data source, in the order in which it was handed out.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.data.journal.rows import COLUMNS, UNUSABLE, Leaf, RowCodec, regrouped
from slime.data.journal.schema import NOT_CONSUMED, OPEN
from slime.data.sample import Sample
from slime.data.source import Group

_TEACHES = """SELECT 1 FROM groups JOIN samples ON group_id = groups.id
WHERE rollout_id = ? AND status != 'failed' AND response_length > 0 LIMIT 1"""


@dataclass(frozen=True)
class Recovered:
    """Where a run goes on."""

    position: dict[str, Any] | None
    """Of the data source, after the last hand-out."""
    groups: list[Group]
    """Handed out and in no batch: to be put back."""
    batches: list[int]
    """Rollouts whose batches are there to be trained on again."""
    fresh: bool
    """Nothing was recorded yet: the data source's own saved position counts."""
    moved: Path | None = None
    """Where an older journal went that `start` does not fit to."""
    moved_work: bool = False
    """Whether there was more in it than samples to look at."""
    unusable: list[str] = field(default_factory=list)
    """Why rows were of no use, one sentence each: their samples have failed, and are sampled anew."""


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether nothing was ever recorded."""
    recorded = (  # consumed groups without a row in rollouts are only there to be looked at
        f"SELECT 1 FROM groups WHERE state IN {NOT_CONSUMED}",
        "SELECT 1 FROM rollouts",
        "SELECT 1 FROM positions",
        "SELECT 1 FROM meta WHERE key = 'position'",
    )
    return not any(connection.execute(query).fetchone() for query in recorded)


def has_content(connection: sqlite3.Connection) -> bool:
    """Whether there is any sample that is more than a prompt."""
    row = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM samples WHERE status != 'pending' OR response_length > 0) "
        "OR EXISTS (SELECT 1 FROM evaluated_samples)"
    )
    return bool(row.fetchone()[0])


def usable_from(connection: sqlite3.Connection, start: int) -> bool:
    """Whether the journal still has what `start` and later rollouts need, and came as far as `start`."""
    horizon_row = connection.execute("SELECT value FROM meta WHERE key = 'horizon'").fetchone()
    if horizon_row is None:
        return True
    horizon = int(horizon_row[0])
    last = connection.execute("SELECT MAX(rollout_id) FROM rollouts").fetchone()[0]
    return horizon <= start <= max(horizon - 1, -1 if last is None else int(last)) + 1


def replay_from(connection: sqlite3.Connection, start: int, *, forget_later: bool = True) -> list[int]:
    """Mark batches before `start` as consumed and (with `forget_later`) the others as not; the ids of those."""
    connection.execute(
        "UPDATE groups SET state = 'consumed', consumed_by = rollout_id WHERE rollout_id < ? AND state = 'assigned'",
        (start,),
    )
    connection.execute("UPDATE rollouts SET state = 'consumed' WHERE rollout_id < ?", (start,))
    if forget_later:
        connection.execute(
            "UPDATE groups SET state = 'assigned', consumed_by = NULL WHERE rollout_id >= ? AND state = 'consumed'",
            (start,),
        )
        connection.execute("UPDATE rollouts SET state = 'assigned' WHERE rollout_id >= ?", (start,))
    later = connection.execute("SELECT rollout_id FROM rollouts WHERE rollout_id >= ? ORDER BY rollout_id", (start,))
    return [int(row[0]) for row in later]


def unusable_rows(connection: sqlite3.Connection, rows: RowCodec) -> list[tuple[int, Sample]]:
    """Rows that a restart would stumble over, each with the failure that its sample becomes."""
    columns = ", ".join(f"samples.{name}" for name in COLUMNS)
    found = connection.execute(
        f"SELECT samples.id, {columns} FROM groups JOIN samples ON group_id = groups.id "
        f"WHERE state IN {OPEN} OR state = 'assigned'"
    )
    looked_at = ((row_id, rows.sample_or_failure(row_id, values, check=True)) for row_id, *values in found)
    return [(row_id, sample) for row_id, sample in looked_at if (sample.failure or "").startswith(UNUSABLE)]


def give_up_useless(connection: sqlite3.Connection, batches: list[int]) -> list[int]:
    """The batches in which there is anything to train on; the groups of the others are dropped."""
    useful = []
    for rollout_id in batches:
        if connection.execute(_TEACHES, (rollout_id,)).fetchone() is not None:
            useful.append(rollout_id)
            continue
        connection.execute(
            "UPDATE groups SET state = 'dropped', rollout_id = NULL, position = NULL WHERE rollout_id = ?",
            (rollout_id,),
        )
        connection.execute("DELETE FROM rollouts WHERE rollout_id = ?", (rollout_id,))
    return useful


def read_groups(connection: sqlite3.Connection, rows: RowCodec, where: str, values: tuple[Any, ...]) -> list[Group]:
    """The groups that a condition chooses: by their place in the batch, or in the order they were handed out."""
    columns = ", ".join(f"samples.{name}" for name in COLUMNS)
    found = connection.execute(
        f"SELECT group_id, samples.id, member, leaf, {columns} FROM groups JOIN samples ON group_id = groups.id "
        f"WHERE {where} ORDER BY position, groups.id, member, leaf",
        values,
    )
    return regrouped(_leaves(found, rows))


def read_samples(connection: sqlite3.Connection, rows: RowCodec, row_ids: Sequence[int]) -> dict[int, Sample]:
    """The samples of rows that are there and can be used, by row id."""
    query = f"SELECT {', '.join(COLUMNS)} FROM samples WHERE id = ?"
    found: dict[int, Sample] = {}
    for row_id in row_ids:
        columns = connection.execute(query, (row_id,)).fetchone()
        if columns is not None:
            sample = rows.sample_or_failure(row_id, columns, check=True)
            if not (sample.failure or "").startswith(UNUSABLE):
                found[row_id] = sample
    return found


def name_of(connection: sqlite3.Connection) -> str | None:
    """The name of a journal; None as long as nobody has asked for it."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'name'").fetchone()
    return None if row is None else str(row[0])


def _leaves(found: Iterator[tuple[Any, ...]], rows: RowCodec) -> Iterator[tuple[int, Leaf]]:
    for group_id, row_id, member, leaf, *columns in found:
        yield group_id, Leaf(rows.sample_or_failure(row_id, columns, check=False), member, leaf)
