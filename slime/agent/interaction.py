"""Exchanges of a live service: a conversation, the model's answer and the client's next message; the training unit.

Exchanges wait to be trained on in an SQLite file in the run folder. A row is written before the client has the end of
its next answer. It belongs to one slot (a sample of the run) from the moment at which it is taken, and is deleted when
the slot's sample is in the journal.

Invariants: the record of an exchange is a session of one turn; its context has the ids that the engine received, its
turn has the ids that the engine sampled, and nothing is tokenized a second time. An exchange is given to one slot, and
to the same slot again after a crash: no exchange is lost or trained on twice. Exchanges without consent are never
stored.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path

from slime.agent.messages import Message
from slime.agent.session.limits import SessionCounters
from slime.agent.session.records import BadRecord, message_of, message_record, turn_record
from slime.agent.session.session import Session
from slime.agent.session.tree import Context, Turn, concatenate_ids, path
from slime.data.buffer.codec import Codec
from slime.storage.json_types import JsonMapping, JsonObject
from slime.storage.sqlite_store import FileKind, SqliteStore


@dataclass(frozen=True)
class Exchange:
    """One answer and its context, as judges and filters see it.

    `asked` is the whole conversation before the answer, `followed_by` the messages that the client sent after it:
    usually the user's next message, but the result of a tool if the answer called one.
    """

    id: str
    asked: tuple[Message, ...]
    answer: Message
    followed_by: tuple[Message, ...]
    tools: tuple[JsonMapping, ...]
    session: JsonMapping
    """The one-turn session (`Session.to_record`) from which samples are made."""

    @property
    def question(self) -> str:
        """The last message of the user before the answer; "" if there is none."""
        return next((message.content for message in reversed(self.asked) if message.role == "user"), "")

    @property
    def next_user_turn(self) -> str | None:
        """The first message of the user after the answer; None if there is none."""
        return next((message.content for message in self.followed_by if message.role == "user"), None)

    def texts(self) -> list[str]:
        """All texts of the exchange, for filters; includes the history, because it is in the prompt of the sample."""
        messages = (*self.asked, self.answer, *self.followed_by)
        calls = (call.arguments for message in messages for call in message.tool_calls)
        texts = (message.content for message in messages)
        return [*texts, *(message.reasoning or "" for message in messages), *calls]

    def to_record(self) -> JsonObject:
        """Plain values and arrays."""
        return {
            "id": self.id,
            "asked": [message_record(message) for message in self.asked],
            "answer": message_record(self.answer),
            "followed_by": [message_record(message) for message in self.followed_by],
            "tools": [dict(tool) for tool in self.tools],
            "session": dict(self.session),
        }

    @classmethod
    def from_record(cls, record: JsonMapping) -> Exchange:
        """The inverse of `to_record`; raises `BadRecord`."""
        try:
            return cls(
                id=str(record["id"]),
                asked=tuple(map(message_of, record["asked"])),
                answer=message_of(record["answer"]),
                followed_by=tuple(map(message_of, record["followed_by"])),
                tools=tuple(record["tools"]),
                session=record["session"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRecord(f"an exchange cannot be read: {type(error).__name__}: {error}") from error


def exchange_of(session: Session, turn: Turn, followed_by: tuple[Message, ...]) -> Exchange:
    """The exchange around a turn of an open session."""
    history = path(turn.parent)
    messages = session.messages(turn)
    tools = (history[0] if history else turn).context.tools
    context = Context(number=1, parent=None, messages=(), ids=concatenate_ids(history, turn.context), tools=tools)
    alone = replace(
        turn, number=0, context=context, meta_info=dict(turn.meta_info), reward=None, limited=None, contexts=[]
    )
    context.turns.append(alone)
    counters = SessionCounters(turns=1, extended=1, sampled_tokens=len(turn.ids), prompt_tokens=len(context.ids))
    record = {
        "key": turn.id,
        "closed": True,
        "differing": 0,
        "counters": counters.to_dict(),
        "turns": [turn_record(alone)],
    }
    return Exchange(turn.id, tuple(messages[:-1]), turn.message, followed_by, tuple(tools), record)


@dataclass(frozen=True)
class Verdict:
    """The result of judging an exchange.

    `reward` is the reward for training. `hint` is a text, from the client's next turn, on how the answer should have
    been: appended to the question, it makes the model its own teacher (`--use-opd --opd-type sample`).
    """

    reward: float
    hint: str | None = None

    @classmethod
    def of(cls, given: object, who: str) -> Verdict | None:
        """Validate the return value of a judge: a verdict, a number, or None if the exchange gives no evidence."""
        if given is None or isinstance(given, Verdict):
            verdict = given
        elif isinstance(given, int | float) and not isinstance(given, bool):
            verdict = cls(float(given))
        else:
            raise TypeError(f"{who} must return a Verdict, a number or None, not {given!r:.80}")
        if verdict is not None and not math.isfinite(verdict.reward):
            raise ValueError(f"{who} gave the reward {verdict.reward}: it must be finite")
        return verdict


logger = logging.getLogger(__name__)

FILE_NAME = "live.sqlite"
_SCHEMA = """
CREATE TABLE exchanges (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, conversation TEXT NOT NULL,
    slot INTEGER, record BLOB NOT NULL
)
"""
_KIND = FileKind(
    "the queue of a live service",
    0x736C6C76,
    1,
    _SCHEMA,
    "SELECT slot FROM exchanges LIMIT 1",
    ("secure_delete=ON",),  # deleted rows do not stay in free pages
)


class ExchangeStore(SqliteStore):
    """Stores the waiting exchanges, oldest first."""

    def __init__(self, path: Path) -> None:
        """Make or open `path`."""
        super().__init__(path, _KIND)
        self._codec = Codec()

    async def put(self, conversation: str, record: JsonMapping) -> None:
        """Store an exchange (`Exchange.to_record`); it is in the file when this returns."""

        def change(connection: sqlite3.Connection) -> None:
            content = self._codec.pack(dict(record), f"exchange {record['id']}")
            connection.execute(
                "INSERT OR IGNORE INTO exchanges (id, conversation, record) VALUES (?, ?, ?)",
                (record["id"], conversation, content),
            )

        await self.write(lambda: change)

    def take(self, slot: int) -> JsonMapping | None:
        """Assign an exchange to this slot: the one it had before a crash, else the oldest unassigned one, else None."""
        self.drain()
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
                    logger.warning("%s: an exchange cannot be read (%s); it is deleted", self.path, error)
                connection.execute("DELETE FROM exchanges WHERE number = ?", (row[0],))

    def taken(self) -> list[tuple[int, str]]:
        """The slots with an exchange, and its id."""
        with self.reading() as connection:
            rows = connection.execute("SELECT slot, id FROM exchanges WHERE slot IS NOT NULL").fetchall()
        return [(int(slot), str(name)) for slot, name in rows]

    async def forget(self, id: str) -> None:
        """Delete an exchange that is in the journal or will not be trained on."""
        await self.execute("DELETE FROM exchanges WHERE id = ?", (id,))

    async def forget_slot(self, slot: int) -> None:
        """Delete the exchange of a slot, because its sample is in the journal."""
        await self.execute("DELETE FROM exchanges WHERE slot = ?", (slot,))

    async def withdraw(self, conversation: str) -> None:
        """Delete the unassigned exchanges of a conversation, whose client withdrew consent."""
        await self.execute("DELETE FROM exchanges WHERE conversation = ? AND slot IS NULL", (conversation,))

    def waiting(self) -> int:
        """The number of unassigned exchanges."""
        self.drain()
        with self.reading() as connection:
            row = connection.execute("SELECT COUNT(*) FROM exchanges WHERE slot IS NULL").fetchone()
        return int(row[0])
