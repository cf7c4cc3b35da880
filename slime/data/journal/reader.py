"""Looking into a journal, also while its run is going.

Invariant: nothing is ever written, and all that one `Reader` shows is the journal at one moment.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.data.journal.database import open_read_only
from slime.data.journal.rows import COLUMNS, RowCodec
from slime.data.journal.schema import STATES
from slime.data.sample import Sample
from slime.errors import UserError

NAME = "journal.sqlite"

_PLACE = "samples.id, group_index, state, rollout_id, consumed_by"
_FROM = "FROM samples JOIN groups ON groups.id = samples.group_id"


@dataclass(frozen=True)
class Choice:
    """Which samples; None means all."""

    state: str | None = None
    rollout: int | None = None
    group: int | None = None
    sample: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    status: str | None = None

    def condition(self) -> tuple[str, list[Any]]:
        """As SQL with its values."""
        asked = {
            "state = ?": self.state,
            "rollout_id = ?": self.rollout,
            "group_index = ?": self.group,
            "sample_index = ?": self.sample,
            "reward >= ?": self.min_reward,
            "reward <= ?": self.max_reward,
            "status = ?": self.status,
        }
        asked = {term: value for term, value in asked.items() if value is not None}
        return " AND ".join(asked) or "TRUE", list(asked.values())


@dataclass(frozen=True)
class Recorded:
    """A sample and where it is in its life."""

    sample: Sample
    state: str
    rollout_id: int | None
    consumed_by: int | None


class Reader:
    """Queries of an open journal."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._rows = RowCodec()

    def totals(self) -> dict[str, int]:
        """Samples by state, in the order of their life."""
        found = dict(self._connection.execute(f"SELECT state, COUNT(*) {_FROM} GROUP BY state").fetchall())
        return {state: found[state] for state in STATES if state in found}

    def count(self, choice: Choice) -> int:
        """How many samples are chosen."""
        condition, values = choice.condition()
        return int(self._connection.execute(f"SELECT COUNT(*) {_FROM} WHERE {condition}", values).fetchone()[0])

    def rewards(self, row_ids: list[int]) -> dict[int, float | None]:
        """The reward column, which also has the number of a reward of several."""
        return {
            row_id: self._connection.execute("SELECT reward FROM samples WHERE id = ?", (row_id,)).fetchone()[0]
            for row_id in row_ids
        }

    def samples(self, choice: Choice, limit: int | None = None) -> Iterator[Recorded]:
        """Chosen samples in the order in which they were handed out."""
        condition, values = choice.condition()
        columns = ", ".join(f"samples.{name}" for name in COLUMNS)
        found = self._connection.execute(
            f"SELECT {_PLACE}, {columns} {_FROM} WHERE {condition} ORDER BY groups.id, member, leaf LIMIT ?",
            [*values, -1 if limit is None else limit],
        )
        for row_id, _, state, rollout_id, consumed_by, *values in found:
            yield Recorded(self._rows.sample(row_id, values), state, rollout_id, consumed_by)


@contextmanager
def reading(run: str) -> Iterator[Reader]:
    """The journal of a run folder, or a journal file, at this moment."""
    with open_read_only(journal_path(run)) as connection:
        connection.execute("BEGIN")
        yield Reader(connection)


def journal_path(run: str) -> Path:
    """The journal file that `run` means; a `UserError` when there is none."""
    path = Path(run)
    if path.is_dir():
        path = path / NAME
        if not path.exists():
            raise UserError(f"{run}: has no {NAME}; give the folder of a run (its --output-dir)")
    if not path.is_file():
        raise UserError(f"{run}: no such run folder or journal file; give the folder of a run (its --output-dir)")
    return path
