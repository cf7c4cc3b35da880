"""A conversation as sessions see it, whichever dialect the client speaks.

Every dialect translates its bodies to these and its answers from them; no session knows a dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant made; `arguments` is JSON text as the client sent it, of which only the value counts."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message. Of an assistant's, `reference` is the mark by which its turn is known, where the client echoes it."""

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
