"""Chat messages as they come from files and plugins, made into what a chat template renders as it was meant.

Invariant: the content of a message is a text (or absent beside tool calls) before a template sees it; never a list or
an object, which most templates print in Python's own notation. Parts of text are joined as they stand; what is no text
is refused, since the models here read text alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.errors import UserError

Message = dict[str, Any]

ASSISTANT = "assistant"
_TEXT_PARTS = ("text", "input_text", "output_text")


def checked_messages(messages: Sequence[Any], where: str) -> list[Message]:
    """The messages with their contents as texts; a `UserError` says what is wrong with which."""
    return [_checked_message(message, f"{where}: message {number}") for number, message in enumerate(messages)]


def is_conversation(value: Any) -> bool:
    """Whether a value is meant as chat messages: a list of objects with roles."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def _checked_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"{where}: a chat message must be an object with a 'role' and a 'content', not {message!r:.80}")
    # Parquet gives every message the keys of all messages; an absent key and a null one mean the same.
    known = {key: value for key, value in message.items() if value is not None}
    content = known.get("content")
    if content is not None:
        return {**known, "content": _content_text(content, where)}
    if message["role"] != ASSISTANT:
        raise UserError(f"{where}: the {message['role']} says nothing: give it a 'content'")
    # Templates ask for the content of a turn without tool calls and would print None.
    return {**known, "content": None if "tool_calls" in known else ""}


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}: 'content' must be text or a list of parts, not {type(content).__name__}")
    return "".join(_part_text(part, where) for part in content)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise UserError(f"{where}: a part of 'content' must be an object with a 'type', not {part!r:.80}")
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        raise UserError(f"{where}: holds a part of type {kind!r}; this version reads text alone: leave it out")
    if not isinstance(part.get("text"), str):
        raise UserError(f"{where}: a part of type {kind!r} has no 'text': {part!r:.80}")
    return part["text"]
