"""Writes groups of samples to the tables, inside a transaction of the caller.

Invariant: a sample that was handed out has one row (its fan-out: one row each); all copies of it that return are
matched by `journal_id`. Rows of samples that left their group are deleted in the same transaction. Samples of batches
that are trained on are never modified: if a source serves them again, they are recorded as new samples. A row whose
content is unchanged is not written again (`slime.data.buffer.rows`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from slime.data.buffer.database import OPEN
from slime.data.buffer.rows import COLUMNS, ContentKey, GroupLeaf, RowCodec, state_of, status_of
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
    def is_free(self) -> bool:
        """True if the row may be modified: its group is in no batch."""
        return self.state in OPEN or self.state == "dropped"


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

    def write_groups(
        self, connection: sqlite3.Connection, groups: Sequence[list[GroupLeaf]], state: str | None = None
    ) -> list[int]:
        """Write the state of groups and changed content; returns the ids of the groups and sets those of the leaves.

        Without `state`, a group's state follows from its samples. A group reuses the group row of its first known
        sample, if that row is free and not taken by another group of the same call. Samples that left their groups are
        deleted.
        """
        known_ids = [leaf.sample.journal_id for leaves in groups for leaf in leaves]
        wanted = [row_id for row_id in known_ids if row_id is not None]
        found: dict[int | None, RowLocation] = {}
        for begin in range(0, len(wanted), _AT_ONCE):
            some = wanted[begin : begin + _AT_ONCE]
            query = f"{_HOMES} IN ({', '.join('?' * len(some))})"
            found |= {row[0]: place for row in connection.execute(query, some) if (place := RowLocation(*row)).is_free}
        following = (found.get(row_id) for row_id in known_ids)
        group_ids: list[int] = []
        old_groups: list[tuple[str, int]] = []
        rows: list[GroupLeaf] = []
        used: set[int] = set()
        claimed: set[int] = set()
        for leaves in groups:
            homes = list(islice(following, len(leaves)))
            new_state = state or state_of((status_of(leaf.sample), leaf.sample.response_length) for leaf in leaves)
            free = (home.group_id for home in homes if home is not None and home.group_id not in claimed)
            group_id = next(free, None)
            if group_id is None:
                self._last_group = group_id = self._last_group + 1
                connection.execute(
                    "INSERT INTO groups (id, group_index, state) VALUES (?, ?, ?)",
                    (group_id, leaves[0].sample.group_index, new_state),
                )
            else:
                old_groups.append((new_state, group_id))
            claimed.add(group_id)
            group_ids.append(group_id)
            for leaf, home in zip(leaves, homes, strict=True):
                is_new = home is None or home.row_id in used
                leaf.group_id, leaf.row_id = group_id, self._next_sample() if home is None or is_new else home.row_id
                used.add(leaf.row_id)
                known, content = self._contents.get(leaf.row_id), leaf.content
                is_written = known is not None and known.is_in_file and content is not None and known.key == content.key
                if home is None or is_new or not is_written:
                    rows.append(leaf)
                elif (home.group_id, home.member, home.leaf) != (group_id, leaf.member, leaf.leaf):
                    connection.execute(_MOVE, (group_id, leaf.member, leaf.leaf, leaf.row_id))
        connection.executemany(_SET_STATE, old_groups)
        self._put(connection, rows)
        touched = {place.group_id for place in found.values()}
        for group_id in touched:
            held = connection.execute("SELECT id FROM samples WHERE group_id = ?", (group_id,))
            if left_over := [row_id for (row_id,) in held if row_id not in used]:
                self._delete(connection, left_over)
        connection.executemany("DELETE FROM groups WHERE id = ?", [(group_id,) for group_id in touched - claimed])
        return group_ids

    def write_member(self, connection: sqlite3.Connection, home: RowLocation, leaves: list[GroupLeaf]) -> None:
        """Replace the rows of one dispatched sample with its results, and set their row ids.

        The first result gets the row id of the dispatched sample, so that copies made before the dispatch stay valid.
        """
        held = connection.execute(
            "SELECT id FROM samples WHERE group_id = ? AND member IS ?", (home.group_id, home.member)
        )
        old = {int(row_id) for (row_id,) in held}
        ids: list[int] = []
        for leaf in leaves:
            own = leaf.sample.journal_id if ids else home.row_id
            leaf.row_id = own if own is not None and own in old and own not in ids else self._next_sample()
            leaf.group_id, leaf.member = home.group_id, home.member
            ids.append(leaf.row_id)
        self._delete(connection, old - set(ids))
        self._put(connection, leaves)

    def update(self, connection: sqlite3.Connection, row_id: int, columns: tuple[object, ...]) -> None:
        """Write new content into one row."""
        self._contents.pop(row_id, None)
        connection.execute(_UPDATE, (*columns, row_id))

    def _next_sample(self) -> int:
        self._last_sample += 1
        return self._last_sample

    def _put(self, connection: sqlite3.Connection, leaves: Iterable[GroupLeaf]) -> None:
        """Write rows one by one; rows that are not encoded yet are encoded lazily, so only one is in memory."""

        def values(leaf: GroupLeaf) -> tuple[object, ...]:
            if leaf.content is None:
                self._contents.pop(leaf.row_id, None)
            else:
                self._contents[leaf.row_id] = leaf.content
            columns = leaf.columns or self._rows.columns(leaf.sample)
            return leaf.row_id, leaf.group_id, leaf.member, leaf.leaf, *columns

        connection.executemany(_PUT, map(values, leaves))

    def _delete(self, connection: sqlite3.Connection, row_ids: Iterable[int]) -> None:
        gone = list(row_ids)
        connection.executemany("DELETE FROM samples WHERE id = ?", [(row_id,) for row_id in gone])
        self.forget(gone)
