"""An exchange: what was asked, what the model answered, and what the client said next; the unit that is trained on.

Invariant: the record of an exchange is a session of one turn, whose context holds the ids that the engine was sent and
whose turn those that it sampled; nothing here is encoded a second time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.agent.messages import Message
from slime.agent.session.counters import Counters
from slime.agent.session.records import BadRecord, message_of, message_record, turn_record
from slime.agent.session.session import Session
from slime.agent.session.tree import Context, Turn, joined, path


@dataclass(frozen=True)
class Exchange:
    """One answer and its neighbourhood, as judges and filters see it.

    `asked` is the whole conversation before the answer, `followed_by` what the client sent after it: usually the
    user's next message, but the result of a tool where the answer called one.
    """

    id: str
    asked: tuple[Message, ...]
    answer: Message
    followed_by: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    session: Mapping[str, Any]
    """The one-turn session (`Session.to_record`) that samples are made of."""

    @property
    def question(self) -> str:
        """What the user had said last before the answer; "" where nobody had."""
        return next((message.content for message in reversed(self.asked) if message.role == "user"), "")

    @property
    def next_user_turn(self) -> str | None:
        """What the user said next; None where something else came first."""
        return next((message.content for message in self.followed_by if message.role == "user"), None)

    def texts(self) -> list[str]:
        """Every word of it, for filters: also those of the history, which is in the prompt that is trained on."""
        said = (*self.asked, self.answer, *self.followed_by)
        calls = (call.arguments for message in said for call in message.tool_calls)
        return [*(message.content for message in said), *(message.reasoning or "" for message in said), *calls]

    def to_record(self) -> dict[str, Any]:
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
    def from_record(cls, record: Mapping[str, Any]) -> Exchange:
        """The inverse of `to_record`, or a `BadRecord`."""
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
    said = session.messages(turn)
    tools = (history[0] if history else turn).context.tools
    context = Context(number=1, parent=None, messages=(), ids=joined(history, turn.context), tools=tools)
    alone = Turn(
        id=turn.id,
        number=0,
        context=context,
        held=turn.held,
        ids=turn.ids,
        log_probs=turn.log_probs,
        delivered=turn.delivered,
        finish_reason=turn.finish_reason,
        meta_info=dict(turn.meta_info),
        text=turn.text,
        ill_formed=turn.ill_formed,
    )
    context.turns.append(alone)
    counters = Counters(turns=1, extended=1, sampled_tokens=len(turn.ids), prompt_tokens=len(context.ids))
    record = {
        "key": turn.id,
        "closed": True,
        "differing": 0,
        "counters": counters.to_dict(),
        "turns": [turn_record(alone)],
    }
    return Exchange(turn.id, tuple(said[:-1]), turn.message, followed_by, tuple(tools), record)


@dataclass(frozen=True)
class Verdict:
    """What a judge makes of an exchange.

    `reward` is what training gets. `hint` is what the client's next turn says about how the answer should have been:
    appended to the question, it makes the model its own teacher (`--use-opd --opd-type sample`).
    """

    reward: float
    hint: str | None = None

    @classmethod
    def of(cls, given: Any, who: str) -> Verdict | None:
        """What a judge returned: a verdict, a number, or None for "this says nothing about the answer"."""
        if given is None or isinstance(given, Verdict):
            verdict = given
        elif isinstance(given, int | float) and not isinstance(given, bool):
            verdict = cls(float(given))
        else:
            raise TypeError(f"{who} must return a Verdict, a number or None, not {given!r:.80}")
        if verdict is not None and not math.isfinite(verdict.reward):
            raise ValueError(f"{who} gave the reward {verdict.reward}: it must be finite")
        return verdict
