"""Messages, tool calls and turn requests in the form that sessions use, independent of any API dialect.

Each dialect translates its request bodies to these types and builds its answers from them; no session knows a dialect.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from slime.errors import UserError
from slime.storage.json_types import JsonMapping

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A tool call of an assistant; `arguments` is JSON text as the client sent it, compared by its value only."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message. `reference` of an assistant message identifies its turn, if the client echoes it."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reference: str | None = None


@dataclass(frozen=True)
class TurnRequest:
    """A client's request for one more turn after these messages.

    `tools` are function schemas in OpenAI's form (`{"type": "function", "function": {...}}`). `tool_choice` is "auto",
    "none", "required" or the name of a tool. `params` are the sampling parameters that the client requests, under
    SGLang's names; a session passes on only those that the trainer leaves open.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonMapping, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    max_tokens: int | None = None
    params: JsonMapping = field(default_factory=dict)


def messages_of(prompt: object) -> list[Message]:
    """Convert a sample's prompt to messages: it is a list in OpenAI's form, or text, which becomes a user message."""
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    if not isinstance(prompt, list | tuple):
        raise UserError(f"the prompt {prompt!r:.80} is neither text nor messages: convert it to one of them first")
    return [_message_of(message, number) for number, message in enumerate(prompt)]


def _message_of(given: JsonMapping, number: int) -> Message:
    role: Any = "system" if given.get("role") == "developer" else given.get("role")
    if role not in get_args(Role):
        raise UserError(
            f"message {number} of a prompt has the role {role!r}; it must be one of {', '.join(get_args(Role))}"
        )
    content = given.get("content")
    if content is not None and not isinstance(content, str):
        raise UserError(f"message {number} of a prompt has the content {content!r:.80}; it must be text")
    calls = []
    for i, call in enumerate(given.get("tool_calls") or ()):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(call.get("id") or f"call_{number}_{i}", function["name"], text))
    reasoning = given.get("reasoning_content")
    return Message(role, content or "", reasoning, tuple(calls), given.get("tool_call_id"), given.get("name"))
