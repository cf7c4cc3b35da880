"""Exchanges that wait to be trained on, in an SQLite file beside the run.

A row is written before the client has the whole of its next answer, belongs to one slot (a sample of the run) from the
moment that it is taken, and goes when the slot's sample is in the journal.

Invariants: an exchange is given to one slot, and to the same one again after a crash: none is lost and none is trained
on twice. What has no consent never comes here.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.data.buffer.codec import Codec
from slime.storage.sqlite_table import RowFile, RowKind

logger = logging.getLogger(__name__)

FILE_NAME = "live.sqlite"
_SCHEMA = """
CREATE TABLE exchanges (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, conversation TEXT NOT NULL,
    slot INTEGER, record BLOB NOT NULL
)
"""
_KIND = RowKind("exchanges of a live service", 0x736C6C76, 1, _SCHEMA, "SELECT slot FROM exchanges LIMIT 1")


class ExchangeStore(RowFile):
    """The waiting exchanges, oldest first."""

    def __init__(self, path: Path) -> None:
        """Make or open `path`."""
        super().__init__(path, _KIND)
        self._codec = Codec()

    async def put(self, conversation: str, record: Mapping[str, Any]) -> None:
        """Keep an exchange (`Exchange.to_record`); in the file when this returns."""

        def change(connection: sqlite3.Connection) -> None:
            content = self._codec.pack(dict(record), f"exchange {record['id']}")
            connection.execute(
                "INSERT OR IGNORE INTO exchanges (id, conversation, record) VALUES (?, ?, ?)",
                (record["id"], conversation, content),
            )

        await self._commits.write(lambda: change)

    def take(self, slot: int) -> Mapping[str, Any] | None:
        """The exchange of this slot: the one it had before a crash, else the oldest that nobody has, else None."""
        self._commits.drain()
        with self.transaction() as connection:
            while True:
                row = connection.execute(
                    "SELECT number, record FROM exchanges WHERE slot = ? OR slot IS NULL "
                    "ORDER BY slot IS NULL, number LIMIT 1",
                    (slot,),
                ).fetchone()
                if row is None:
                    return None
                connection.execute("UPDATE exchanges SET slot = ? WHERE number = ?", (slot, row[0]))
                try:
                    record = self._codec.unpack(row[1])
                    if isinstance(record, dict):
                        return record
                except (ValueError, TypeError, KeyError) as error:
                    logger.warning("%s: an exchange cannot be read (%s); it is left out", self.path, error)
                connection.execute("DELETE FROM exchanges WHERE number = ?", (row[0],))

    def taken(self) -> list[tuple[int, str]]:
        """Slots that have an exchange, and its id."""
        with self._lock:
            rows = self._connection.execute("SELECT slot, id FROM exchanges WHERE slot IS NOT NULL").fetchall()
        return [(int(slot), str(name)) for slot, name in rows]

    async def forget(self, name: str) -> None:
        """An exchange is in the journal, or is not to be trained on."""
        await self._delete("id = ?", (name,))

    async def forget_slot(self, slot: int) -> None:
        """The exchange of a slot is in the journal."""
        await self._delete("slot = ?", (slot,))

    async def withdraw(self, conversation: str) -> None:
        """Consent is taken back: what nobody has taken yet goes."""
        await self._delete("conversation = ? AND slot IS NULL", (conversation,))

    def waiting(self) -> int:
        """How many nobody has taken."""
        self._commits.drain()
        with self._lock:
            row = self._connection.execute("SELECT COUNT(*) FROM exchanges WHERE slot IS NULL").fetchone()
        return int(row[0])

    async def _delete(self, where: str, values: tuple[Any, ...]) -> None:
        def change(connection: sqlite3.Connection) -> None:
            connection.execute(f"DELETE FROM exchanges WHERE {where}", values)

        await self._commits.write(lambda: change)
