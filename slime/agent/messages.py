"""A conversation as sessions see it, whichever dialect the client speaks.

Every dialect translates its bodies to these and its answers from them; no session knows a dialect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from slime.errors import UserError

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant made; `arguments` is JSON text as the client sent it, of which only the value counts."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message. Of an assistant's, `reference` is the mark by which its turn is known, if the client echoes it."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reference: str | None = None


@dataclass(frozen=True)
class TurnRequest:
    """What a client asks for: one more turn after these messages.

    `tools` are function schemas in OpenAI's form (`{"type": "function", "function": {...}}`). `tool_choice` is "auto",
    "none", "required" or the name of a tool. `params` are the sampling parameters that the client asks for, by SGLang's
    names, of which a session lets only those through that the trainer leaves open.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    max_tokens: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


def messages_of(prompt: Any) -> list[Message]:
    """A sample's prompt as a conversation: messages in OpenAI's form, or a text, which is what the user says."""
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    if not isinstance(prompt, list | tuple):
        raise UserError(f"the prompt {prompt!r:.80} is neither text nor messages: make them of it first")
    return [_message_of(message, number) for number, message in enumerate(prompt)]


def _message_of(given: Mapping[str, Any], number: int) -> Message:
    role: Any = "system" if given.get("role") == "developer" else given.get("role")
    if role not in get_args(Role):
        raise UserError(f"message {number} of a prompt has the role {role!r}; there are: {', '.join(get_args(Role))}")
    content = given.get("content")
    if content is not None and not isinstance(content, str):
        raise UserError(f"message {number} of a prompt must have text for its content, not {content!r:.80}")
    calls = tuple(_call_of(call, f"call_{number}_{i}") for i, call in enumerate(given.get("tool_calls") or ()))
    reasoning = given.get("reasoning_content")
    return Message(role, content or "", reasoning, calls, given.get("tool_call_id"), given.get("name"))


def _call_of(given: Mapping[str, Any], default_id: str) -> ToolCall:
    function = given.get("function", given)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(given.get("id") or default_id, function["name"], text)
