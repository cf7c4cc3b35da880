"""Conversations in the form that one chat template takes.

Invariant: every text of the conversation is in what the template gets, in its order; what a template has no place for
(a system message in the middle, a tool's result, two questions in a row) is put into a message that it has a place for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.agent.messages import Message, ToolCall

_PARAGRAPH = "\n\n"
_NINE = re.compile("[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class Shape:
    """What a template takes; the defaults are everything."""

    parts: bool = False
    """Contents as lists of parts; else as text."""
    mapped_arguments: bool = True
    """Arguments of calls as a mapping; else as JSON text."""
    empty_is_none: bool = False
    """The content of an assistant that only calls is None; else an empty string."""
    any_call_id: bool = True
    """Call ids of any form; else of nine letters and digits."""
    system_first: bool = True
    system_anywhere: bool = True
    users_in_row: bool = True
    assistants_in_row: bool = True
    assistant_first: bool = True
    calls: bool = True
    parallel_calls: bool = True
    calls_with_text: bool = True
    calls_with_text_and_reasoning: bool = True
    tools: bool = True
    """Results of tools in a role of their own."""
    user_after_tool: bool = True

    def strictest(self) -> Shape:
        """The form that asks least of a template whose refusal the probe did not foresee."""
        return replace(
            self,
            system_anywhere=False,
            users_in_row=False,
            assistants_in_row=False,
            assistant_first=False,
            calls=False,
            tools=False,
        )

    def of(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as a template of this shape takes them."""
        fitted: list[Message] = []
        for message in self._with_first_system(messages):
            for part in self._parts(message):
                self._append(fitted, part)
        return self._as_dicts(fitted)

    def _with_first_system(self, messages: Sequence[Message]) -> list[Message]:
        """System messages at the beginning become one, or the beginning of the first question."""
        count = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
        if not count:
            return list(messages)
        text = _PARAGRAPH.join(message.content for message in messages[:count])
        rest = list(messages[count:])
        if self.system_first:
            return [Message("system", text), *rest]
        if rest and rest[0].role == "user":
            return [replace(rest[0], content=text + _PARAGRAPH + rest[0].content), *rest[1:]]
        return [Message("user", text), *rest]

    def _parts(self, message: Message) -> list[Message]:
        """One message as those that the template has a place for."""
        if message.role == "tool" and not self.tools:
            return [Message("user", f"<tool_response>\n{message.content}\n</tool_response>")]
        if message.role != "assistant" or not message.tool_calls:
            return [message]
        if not self.calls:
            text = "\n".join([*filter(None, [message.content]), *map(_call_as_text, message.tool_calls)])
            return [replace(message, content=text, tool_calls=())]
        if message.content and not self.calls_with_text:
            without_text = Message("assistant", tool_calls=message.tool_calls)
            return [replace(message, tool_calls=()), *self._parts(without_text)]
        if message.content and message.reasoning and not self.calls_with_text_and_reasoning:
            message = replace(message, reasoning=message.reasoning + _PARAGRAPH + message.content, content="")
        if len(message.tool_calls) > 1 and not self.parallel_calls:
            first, *others = message.tool_calls
            alone = [Message("assistant", tool_calls=(call,)) for call in others]
            return [replace(message, tool_calls=(first,)), *alone]
        return [message]

    def _append(self, fitted: list[Message], message: Message) -> None:
        """Add a message, to its neighbour where the template does not take both in a row."""
        before = fitted[-1] if fitted else None
        if message.role == "system" and before is not None and not self.system_anywhere:
            message = Message("user", f"<system-reminder>\n{message.content}\n</system-reminder>")
        if before is None or before.role == "system":
            if message.role == "assistant" and not self.assistant_first:
                fitted.append(Message("user"))
        elif message.role == "user" and self._takes_in(before):
            message = replace(before, content=before.content + _PARAGRAPH + message.content)
            fitted.pop()
        elif message.role == before.role == "assistant" and not self.assistants_in_row:
            fitted.append(Message("user"))
        fitted.append(message)

    def _takes_in(self, before: Message) -> bool:
        """Whether a question has no place of its own after this message."""
        return (before.role == "user" and not self.users_in_row) or (before.role == "tool" and not self.user_after_tool)

    def _as_dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        names: dict[str, str] = {}
        dicts: list[dict[str, Any]] = []
        for message in messages:
            entry: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "assistant":
                names.update((call.id, call.name) for call in message.tool_calls)
                if message.reasoning is not None:
                    entry |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
                if message.tool_calls:
                    entry["tool_calls"] = [self._call(call) for call in message.tool_calls]
                    entry["content"] = message.content or (None if self.empty_is_none else "")
            elif message.role == "tool":
                name = message.name or names.get(message.tool_call_id or "")
                entry |= {"name": name} if name is not None else {}
                entry |= {"tool_call_id": self._id(message.tool_call_id)} if message.tool_call_id is not None else {}
            if self.parts:
                entry["content"] = [{"type": "text", "text": message.content}]
            dicts.append(entry)
        return dicts

    def _call(self, call: ToolCall) -> dict[str, Any]:
        value = _arguments(call)
        arguments = value if self.mapped_arguments else json.dumps(value, ensure_ascii=False)
        return {
            "id": self._id(call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _id(self, call_id: str) -> str:
        if self.any_call_id or _NINE.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]


def completed(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the fields that some templates expect in every one."""
    nothing = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": {**nothing, **(tool.get("function") or {})}}


def _arguments(call: ToolCall) -> dict[str, Any]:
    """The value of a call's arguments; text that is no JSON object is shown under a name of its own."""
    try:
        value = json.loads(call.arguments or "{}")
    except ValueError:
        return {"arguments": call.arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _call_as_text(call: ToolCall) -> str:
    written = json.dumps({"name": call.name, "arguments": _arguments(call)}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"
