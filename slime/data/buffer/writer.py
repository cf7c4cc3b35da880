"""Writes groups of samples to the tables, inside a transaction of the caller.

Invariant: a sample that was handed out has one row (its fan-out: one row each); all copies of it that return are
matched by `journal_id`. Rows of samples that left their group are deleted in the same transaction. Samples of batches
that are trained on are never modified: if a source serves them again, they are recorded as new samples. A row whose
content is unchanged is not written again (`slime.data.buffer.rows`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from slime.data.buffer.rows import COLUMNS, ContentKey, GroupLeaf, RowCodec
from slime.data.sample import Sample

_NAMES = ("id", "group_id", "member", "leaf", *COLUMNS)
_PUT = f"INSERT OR REPLACE INTO samples ({', '.join(_NAMES)}) VALUES ({', '.join('?' * len(_NAMES))})"
_UPDATE = f"UPDATE samples SET {', '.join(f'{name} = ?' for name in COLUMNS)} WHERE id = ?"
_HOMES = """
SELECT samples.id, group_id, member, leaf, state
FROM samples JOIN groups ON groups.id = group_id WHERE samples.id
"""
_SET_STATE = "UPDATE groups SET state = ?, rollout_id = NULL, position = NULL, consumed_by = NULL WHERE id = ?"
_MOVE = "UPDATE samples SET group_id = ?, member = ?, leaf = ? WHERE id = ?"
_AT_ONCE = 500
"""Number of rows in one query."""


class RowLocation(NamedTuple):
    """The location of a sample's row in the journal."""

    row_id: int
    group_id: int
    member: int | None
    leaf: int | None
    state: str

    @property
    def place(self) -> tuple[int, int | None, int | None]:
        """The group id, member and leaf of the row."""
        return self.group_id, self.member, self.leaf


@dataclass(slots=True)
class _Row:
    """A row to write; it replaces an existing row with this id."""

    row_id: int
    group_id: int
    leaf: GroupLeaf


class Writer:
    """Assigns row ids, which are never reused, writes rows, and tracks content keys of rows that may be rewritten."""

    def __init__(self, connection: sqlite3.Connection, rows: RowCodec) -> None:
        self._rows = rows
        self._contents: dict[int, ContentKey] = {}
        """Content keys by row id, of samples that ended and are not in a batch yet."""
        last = dict(connection.execute("SELECT name, seq FROM sqlite_sequence"))
        self._last_group = int(last.get("groups", 0))
        self._last_sample = int(last.get("samples", 0))

    def home(self, connection: sqlite3.Connection, sample: Sample) -> RowLocation | None:
        """Find the row of `sample`; None if it is not in the journal."""
        if sample.journal_id is None:
            return None
        row = connection.execute(f"{_HOMES} = ?", (sample.journal_id,)).fetchone()
        return None if row is None else RowLocation(*row)

    def knows(self, sample: Sample) -> bool:
        """True if the content key of the sample's row is tracked."""
        return sample.journal_id in self._contents

    def forget(self, row_ids: Iterable[int]) -> None:
        """Stop tracking the content keys of these rows; the next write of such a row is unconditional."""
        for row_id in row_ids:
            self._contents.pop(row_id, None)

    def new_group(self, connection: sqlite3.Connection, leaves: list[GroupLeaf], state: str) -> tuple[int, list[int]]:
        """Insert a group; returns its id and the ids of its samples."""
        group_id = self._insert_group(connection, leaves, state)
        ids = [self._next_sample() for _ in leaves]
        self._put(connection, _rows_of(group_id, leaves, ids))
        return group_id, ids

    def write_groups(
        self,
        connection: sqlite3.Connection,
        groups: list[list[GroupLeaf]],
        state: Callable[[list[GroupLeaf]], str],
        reusable: Callable[[RowLocation], bool],
    ) -> list[tuple[int, list[int]]]:
        """Write the state of groups and changed content; returns each group's id with the ids of its samples.

        A group reuses the group row of its first known sample, if that row is `reusable` and not taken by another group
        of the same call. Samples that left their groups are deleted.
        """
        homes = self._homes(connection, [leaf.sample for leaves in groups for leaf in leaves], reusable)
        touched = {home.group_id for home in homes if home is not None}
        written: list[tuple[int, list[int]]] = []
        old_groups: list[tuple[str, int]] = []
        rows: list[_Row] = []
        used: set[int] = set()
        claimed: set[int] = set()
        following = iter(homes)
        for leaves in groups:
            own = list(islice(following, len(leaves)))
            free = (home.group_id for home in own if home is not None and home.group_id not in claimed)
            group_id = next(free, None)
            if group_id is None:
                group_id = self._insert_group(connection, leaves, state(leaves))
            else:
                old_groups.append((state(leaves), group_id))
            claimed.add(group_id)
            ids = []
            for leaf, home in zip(leaves, own, strict=True):
                row_id = self._next_sample() if home is None or home.row_id in used else home.row_id
                used.add(row_id)
                ids.append(row_id)
                known = self._contents.get(row_id)
                content = leaf.content
                is_written = known is not None and known.is_in_file and content is not None and known.key == content.key
                if home is None or home.row_id != row_id or not is_written:
                    rows.append(_Row(row_id, group_id, leaf))
                elif home.place != (group_id, leaf.member, leaf.leaf):
                    connection.execute(_MOVE, (group_id, leaf.member, leaf.leaf, row_id))
            written.append((group_id, ids))
        connection.executemany(_SET_STATE, old_groups)
        self._put(connection, rows)
        for group_id in touched:
            held = connection.execute("SELECT id FROM samples WHERE group_id = ?", (group_id,))
            if left_over := [row_id for (row_id,) in held if row_id not in used]:
                self._delete(connection, left_over)
        connection.executemany("DELETE FROM groups WHERE id = ?", [(group_id,) for group_id in touched - claimed])
        return written

    def write_member(self, connection: sqlite3.Connection, home: RowLocation, leaves: list[GroupLeaf]) -> list[int]:
        """Replace the rows of one dispatched sample with its results; returns the row ids.

        The first result gets the row id of the dispatched sample, so that copies made before the dispatch stay valid.
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
        self._delete(connection, old - set(ids))
        self._put(connection, _rows_of(home.group_id, leaves, ids))
        return ids

    def update(self, connection: sqlite3.Connection, row_id: int, leaf: GroupLeaf) -> None:
        """Write new content into one row."""
        self._contents.pop(row_id, None)
        connection.execute(_UPDATE, (*leaf.columns, row_id))

    def _homes(
        self, connection: sqlite3.Connection, samples: Sequence[Sample], reusable: Callable[[RowLocation], bool]
    ) -> list[RowLocation | None]:
        """Find the `reusable` rows of many samples."""
        wanted = [sample.journal_id for sample in samples if sample.journal_id is not None]
        found: dict[int | None, RowLocation] = {}
        for begin in range(0, len(wanted), _AT_ONCE):
            some = wanted[begin : begin + _AT_ONCE]
            query = f"{_HOMES} IN ({', '.join('?' * len(some))})"
            found |= {row[0]: home for row in connection.execute(query, some) if reusable(home := RowLocation(*row))}
        return [found.get(sample.journal_id) for sample in samples]

    def _insert_group(self, connection: sqlite3.Connection, leaves: list[GroupLeaf], state: str) -> int:
        self._last_group += 1
        index = leaves[0].sample.group_index if leaves else None
        connection.execute(
            "INSERT INTO groups (id, group_index, state) VALUES (?, ?, ?)", (self._last_group, index, state)
        )
        return self._last_group

    def _next_sample(self) -> int:
        self._last_sample += 1
        return self._last_sample

    def _put(self, connection: sqlite3.Connection, rows: Iterable[_Row]) -> None:
        """Write rows one by one; rows that are not encoded yet are encoded lazily, so only one is in memory."""
        connection.executemany(_PUT, map(self._values, rows))

    def _values(self, row: _Row) -> tuple[object, ...]:
        leaf = row.leaf
        if leaf.content is None:
            self._contents.pop(row.row_id, None)
        else:
            self._contents[row.row_id] = leaf.content
        return row.row_id, row.group_id, leaf.member, leaf.leaf, *(leaf.columns or self._rows.columns(leaf.sample))

    def _delete(self, connection: sqlite3.Connection, row_ids: Iterable[int]) -> None:
        gone = [(row_id,) for row_id in row_ids]
        connection.executemany("DELETE FROM samples WHERE id = ?", gone)
        self.forget(row_id for (row_id,) in gone)


def _rows_of(group_id: int, leaves: list[GroupLeaf], ids: list[int]) -> list[_Row]:
    return [_Row(row_id, group_id, leaf) for row_id, leaf in zip(ids, leaves, strict=True)]
