"""Whether a message that a client sends is one that is held.

Invariant: a message is known again however its client writes it down: with other white space around it or inside an
assistant's words, with arguments serialised anew, calls in another order, reasoning left out. What was said otherwise
counts: an edited text is another message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property

from slime.agent.messages import Message, ToolCall


class Held:
    """A message of the history, with what it is compared by computed once."""

    def __init__(self, message: Message) -> None:
        self.message = message

    def is_said_by(self, given: Message) -> bool:
        """Whether `given` is this message; where both are equal as they stand, nothing is normalised."""
        mine = self.message
        if mine.role != given.role or mine.tool_call_id != given.tool_call_id:
            return False
        if mine.role == "assistant":
            return self.says_the_same(given)
        return mine.content == given.content or self._text == tidy(given.content)

    def says_the_same(self, echo: Message) -> bool:
        """Of an assistant's message: the same text and calls, and the same reasoning where the echo has any."""
        mine = self.message
        if not self.says(echo.content):
            return False
        if echo.reasoning and mine.reasoning != echo.reasoning and self._thoughts != words(echo.reasoning):
            return False
        return mine.tool_calls == echo.tool_calls or self._calls == _comparable(echo.tool_calls)

    def says(self, text: str) -> bool:
        """Whether these are the words of this message."""
        return self.message.content == text or self._words == words(text)

    @cached_property
    def call_ids(self) -> frozenset[str]:
        return frozenset(call.id for call in self.message.tool_calls)

    @cached_property
    def _text(self) -> str:
        return tidy(self.message.content)

    @cached_property
    def _words(self) -> str:
        return words(self.message.content)

    @cached_property
    def _thoughts(self) -> str:
        return words(self.message.reasoning or "")

    @cached_property
    def _calls(self) -> list[tuple[str, str]]:
        return _comparable(self.message.tool_calls)


def tidy(text: str) -> str:
    """A text without the white space that ends its lines and surrounds it: indentation has a meaning."""
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()


def words(text: str) -> str:
    """A text as words with single blanks between them."""
    return " ".join(text.split())


def _comparable(calls: Iterable[ToolCall]) -> list[tuple[str, str]]:
    """Calls by name and by the value of their arguments, in an order of their own."""
    return sorted((call.name, _value(call.arguments)) for call in calls)


def _value(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return words(arguments)
