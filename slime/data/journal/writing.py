"""Writing groups of samples into the tables, inside a transaction of the caller.

Invariant: a sample that was handed out has one row (its fan-out: one row each), whatever copies of it come back; they
are found by `journal_id`. What a group held and holds no more is deleted with the same transaction. Samples of batches
that are trained on are never touched: when they come back (a source may serve them again), they are recorded as new.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from slime.data.journal.rows import COLUMNS, Leaf
from slime.data.sample import Sample

_NAMES = ("id", "group_id", "member", "leaf", *COLUMNS)
_PUT = f"INSERT OR REPLACE INTO samples ({', '.join(_NAMES)}) VALUES ({', '.join('?' * len(_NAMES))})"
_UPDATE = f"UPDATE samples SET {', '.join(f'{name} = ?' for name in COLUMNS)} WHERE id = ?"
_HOME = """
SELECT samples.id, group_id, member, state
FROM samples JOIN groups ON groups.id = group_id WHERE samples.id = ?
"""


@dataclass(frozen=True)
class Home:
    """Where the journal has a sample."""

    row_id: int
    group_id: int
    member: int | None
    state: str


class Writer:
    """Gives out row ids, which are never used twice, and writes rows."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        last = dict(connection.execute("SELECT name, seq FROM sqlite_sequence"))
        self._last_group = int(last.get("groups", 0))
        self._last_sample = int(last.get("samples", 0))

    def home(self, connection: sqlite3.Connection, sample: Sample) -> Home | None:
        """Where `sample` is, or None when the journal does not have it."""
        if sample.journal_id is None:
            return None
        row = connection.execute(_HOME, (sample.journal_id,)).fetchone()
        return None if row is None else Home(*row)

    def new_group(self, connection: sqlite3.Connection, leaves: list[Leaf], state: str) -> tuple[int, list[int]]:
        """Insert a group; its id and the ids of its samples."""
        group_id = self._insert_group(connection, leaves, state)
        ids = [self._next_sample() for _ in leaves]
        self._put(connection, group_id, leaves, ids)
        return group_id, ids

    def write_groups(
        self,
        connection: sqlite3.Connection,
        groups: list[list[Leaf]],
        state: Callable[[list[Leaf]], str],
        reusable: Callable[[Home], bool],
    ) -> list[tuple[int, list[int]]]:
        """Write the content and the state of groups; per group its id and the ids of its samples.

        A group is written where the journal has its first sample, if that place is `reusable` and not taken by another
        group of the same call.
        """
        written: list[tuple[int, list[int]]] = []
        used: set[int] = set()
        touched: set[int] = set()
        claimed: set[int] = set()
        for leaves in groups:
            homes = [self._reusable_home(connection, leaf.sample, reusable) for leaf in leaves]
            touched |= {home.group_id for home in homes if home is not None}
            free = (home.group_id for home in homes if home is not None and home.group_id not in claimed)
            group_id = next(free, None)
            if group_id is None:
                group_id = self._insert_group(connection, leaves, state(leaves))
            else:
                connection.execute(
                    "UPDATE groups SET state = ?, rollout_id = NULL, position = NULL, consumed_by = NULL WHERE id = ?",
                    (state(leaves), group_id),
                )
            claimed.add(group_id)
            ids = []
            for home in homes:
                row_id = self._next_sample() if home is None or home.row_id in used else home.row_id
                used.add(row_id)
                ids.append(row_id)
            self._put(connection, group_id, leaves, ids)
            written.append((group_id, ids))
        self._remove_left_over(connection, touched, used, claimed)
        return written

    def write_member(self, connection: sqlite3.Connection, home: Home, leaves: list[Leaf]) -> list[int]:
        """Write what one dispatched sample became in the place of it, or of what it became before; the row ids.

        The first one gets the id of the dispatched sample: copies made before the dispatch still lead here.
        """
        old = {
            int(row[0])
            for row in connection.execute(
                "SELECT id FROM samples WHERE group_id = ? AND member IS ?", (home.group_id, home.member)
            )
        }
        ids: list[int] = []
        for leaf in leaves:
            own = leaf.sample.journal_id if ids else home.row_id
            ids.append(own if own is not None and own in old and own not in ids else self._next_sample())
            leaf.member = home.member
        connection.executemany("DELETE FROM samples WHERE id = ?", [(row_id,) for row_id in old - set(ids)])
        self._put(connection, home.group_id, leaves, ids)
        return ids

    def update(self, connection: sqlite3.Connection, row_id: int, leaf: Leaf) -> None:
        """Write new content into one row."""
        connection.execute(_UPDATE, (*leaf.columns, row_id))

    def _reusable_home(
        self, connection: sqlite3.Connection, sample: Sample, reusable: Callable[[Home], bool]
    ) -> Home | None:
        home = self.home(connection, sample)
        return home if home is not None and reusable(home) else None

    def _insert_group(self, connection: sqlite3.Connection, leaves: list[Leaf], state: str) -> int:
        self._last_group += 1
        index = leaves[0].sample.group_index if leaves else None
        connection.execute(
            "INSERT INTO groups (id, group_index, state) VALUES (?, ?, ?)", (self._last_group, index, state)
        )
        return self._last_group

    def _next_sample(self) -> int:
        self._last_sample += 1
        return self._last_sample

    def _put(self, connection: sqlite3.Connection, group_id: int, leaves: list[Leaf], ids: list[int]) -> None:
        connection.executemany(
            _PUT,
            [
                (row_id, group_id, leaf.member, leaf.leaf, *leaf.columns)
                for row_id, leaf in zip(ids, leaves, strict=True)
            ],
        )

    def _remove_left_over(
        self, connection: sqlite3.Connection, touched: set[int], used: set[int], claimed: set[int]
    ) -> None:
        for group_id in touched:
            rows = connection.execute("SELECT id FROM samples WHERE group_id = ?", (group_id,)).fetchall()
            connection.executemany("DELETE FROM samples WHERE id = ?", [row for row in rows if row[0] not in used])
            if group_id not in claimed:
                connection.execute("DELETE FROM groups WHERE id = ?", (group_id,))
