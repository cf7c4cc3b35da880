"""Anthropic's Messages API, with `count_tokens`.

The turn's reference is the `signature` of its thinking block, which clients send back unchanged. `cache_control` is
dropped everywhere, a list of one text equals that text, and a `role: system` message may be at any position. Usage
follows Anthropic: `input_tokens` are the prompt tokens that were not cached; the three input counts add up to the
prompt.
"""

from __future__ import annotations

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.server.dialects.dialect import (
    Asked,
    Dialect,
    FinishedTurn,
    StreamWriter,
    Usage,
    has_visible_text,
    sse_named,
)
from slime.agent.server.dialects.errors import Problem, anthropic_error
from slime.agent.server.dialects.request_fields import (
    BodyField,
    add_message,
    choice_notes,
    hosted_tool_note,
    parsed_arguments,
)
from slime.models.openai_api import function_names
from slime.models.parsers.events import CallArguments, CallBegun, Event, Reasoning, Text
from slime.storage.json_types import JsonMapping, JsonObject

USED = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "stream", "max_tokens", "stop_sequences"}
    | {"temperature", "top_p", "top_k", "output_format", "output_config", "mcp_servers"}
)
# Accepted and ignored: the identity of the client, billing, caching and storage, hints about effort and thinking, and
# edits of the context that only Anthropic's own service makes.
NEUTRAL = frozenset(
    {"metadata", "service_tier", "thinking", "context_management", "container", "betas", "anthropic_version"}
    | {"anthropic_beta", "cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"}
    | {"fallbacks", "fallback_credit_token", "compaction", "thread"}
)
HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "memory", "advisor")
_TEXT = ("text",)


class MessagesWriter(StreamWriter):
    """Streams content blocks one after the other; the thinking block ends with the turn's reference."""

    def __init__(self, asked: Asked, turn_ref: str) -> None:
        super().__init__(asked, turn_ref)
        self._open: type | int | None = None  # the kind of the open block, or the number of its call
        self._blocks = 0

    def begin(self) -> bytes:
        message = {**_head(self._asked, self._reference), "content": [], "stop_reason": None}
        return sse_named({"type": "message_start", "message": {**message, "usage": usage_body(Usage(0, 0, 0))}})

    def encode(self, shown: Event) -> bytes:
        match shown:
            case Reasoning():
                block = self._start(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                return block + self._delta({"type": "thinking_delta", "thinking": shown.text})
            case Text():
                block = self._start(Text, {"type": "text", "text": ""})
                return block + self._delta({"type": "text_delta", "text": shown.text})
            case CallBegun():
                return self._start(shown.index, {"type": "tool_use", "id": shown.id, "name": shown.name, "input": {}})
            case CallArguments():
                return self._delta({"type": "input_json_delta", "partial_json": shown.text})
        raise AssertionError(shown)

    def keep_alive(self) -> bytes:
        return sse_named({"type": "ping"})

    def end(self, finished: FinishedTurn) -> bytes:
        delta = {"stop_reason": stop_reason(finished), "stop_sequence": None}
        last = {"type": "message_delta", "delta": delta, "usage": usage_body(finished.usage)}
        return self._close() + sse_named(last) + sse_named({"type": "message_stop"})

    def problem(self, problem: Problem) -> bytes:
        return sse_named(anthropic_error(problem))

    def _start(self, what: type | int, block: JsonMapping) -> bytes:
        if self._open == what:
            return b""
        closed = self._close()
        self._open = what
        return closed + sse_named({"type": "content_block_start", "index": self._blocks, "content_block": block})

    def _delta(self, delta: JsonMapping) -> bytes:
        return sse_named({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is Reasoning:
            signed = self._delta({"type": "signature_delta", "signature": self._reference})
        stop = sse_named({"type": "content_block_stop", "index": self._blocks})
        self._open = None
        self._blocks += 1
        return signed + stop


class AnthropicMessages(Dialect):
    name = "messages"
    paths = ("/v1/messages", "/v1/messages/count_tokens")
    writer = MessagesWriter

    def asked(self, path: str, body: object) -> Asked:
        fields = BodyField(body)
        fields.refuse_unknown_fields(USED, NEUTRAL)
        config = fields["output_config"].object(optional=True)
        if config.get("format") or fields["output_format"].value:
            raise BodyField(None, "output_config.format").bad("answers are sampled freely here: leave it out")
        if fields["mcp_servers"].value:
            raise fields["mcp_servers"].bad(
                "no tools are run on this side: connect to the servers yourself and send their tools"
            )
        counting = path.rstrip("/").endswith("/count_tokens")
        tools, notes = _tools(fields["tools"])
        choice, parallel = _tool_choice(fields["tool_choice"], tools)
        longest = fields["max_tokens"].whole(1)
        if longest is None and not counting:
            raise fields["max_tokens"].bad("must be given")
        messages = _conversation(fields)
        params = fields.sampling_params(("temperature", "top_p"), {"top_k": ("top_k", 0)})
        if fields["stop_sequences"].value and (stop := fields["stop_sequences"].text_or_texts()):
            params["stop"] = stop
        request = TurnRequest(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            max_tokens=longest,
            params=params,
        )
        return Asked(
            request=request,
            model=fields["model"].name(),
            stream=fields["stream"].flag() and not counting,
            count_only=counting,
            notes=notes + choice_notes(choice),
        )

    def whole(self, asked: Asked, finished: FinishedTurn) -> JsonObject:
        output = finished.output
        blocks: list[JsonObject] = []
        if has_visible_text(output.reasoning):
            blocks.append({"type": "thinking", "thinking": output.reasoning, "signature": finished.reference})
        if has_visible_text(output.text):
            blocks.append({"type": "text", "text": output.text})
        for call in output.calls:
            given = parsed_arguments(call.arguments)
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        return {
            **_head(asked, finished.reference),
            "content": blocks,
            "stop_reason": stop_reason(finished),
            "usage": usage_body(finished.usage),
        }

    def counted(self, tokens: int) -> JsonObject:
        return {"input_tokens": tokens}

    def error(self, problem: Problem) -> JsonObject:
        return anthropic_error(problem)


def stop_reason(finished: FinishedTurn) -> str:
    return "max_tokens" if finished.is_cut else "tool_use" if finished.output.calls else "end_turn"


def usage_body(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _conversation(fields: BodyField) -> tuple[Message, ...]:
    """The system prompt and the messages; consecutive assistant messages are merged."""
    messages: list[Message] = []
    if instructions := fields["system"].content(_TEXT):
        messages.append(Message("system", instructions))
    for entry in fields["messages"].items():
        content = entry["content"]
        match entry["role"].value:
            case "system":
                added = [Message("system", content.content(_TEXT))]
            case "assistant":
                added = [_assistant(content)]
            case "user":
                added = _user(content)
            case _:
                raise entry["role"].bad("must be user, assistant or system")
        for message in added:
            add_message(messages, message)
    if not any(message.role != "system" for message in messages):
        raise fields["messages"].bad("must have at least one message")
    if messages[-1].role == "assistant":
        raise fields["messages"].bad("must end with a message of the user: prefilled answers are not supported")
    return tuple(messages)


def _user(content: BodyField) -> list[Message]:
    """The messages of a user entry, in the order of its blocks: tool results, and adjacent texts as one message."""
    if not isinstance(content.value, list):
        return [Message("user", content.content(_TEXT))]
    messages: list[Message] = []
    texts: list[str] = []
    for block in content.items():
        if isinstance(block.value, dict) and block.value.get("type") == "tool_result":
            if texts:
                messages.append(Message("user", "\n".join(texts)))
                texts = []
            result = block["content"].result(_TEXT)
            if block["is_error"].flag() and not result.strip():
                result = "Error: the tool failed and said nothing."
            messages.append(Message("tool", result, tool_call_id=block["tool_use_id"].text()))
        else:
            texts.append(block.part(_TEXT))
    if texts or not messages:
        messages.append(Message("user", "\n".join(texts)))
    return messages


def _assistant(content: BodyField) -> Message:
    if not isinstance(content.value, list):
        return Message("assistant", content.content(_TEXT))
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    reference = None
    for block in content.items():
        match block["type"].value:
            case "thinking":
                thoughts.append(block["thinking"].text())
                reference = reference or block["signature"].optional_text() or None
            case "redacted_thinking":
                reference = reference or block["data"].optional_text() or None
            case "tool_use":
                calls.append(ToolCall(block["id"].text(), block["name"].text(), block["input"].json_text()))
            case _:
                texts.append(block.part(_TEXT))
    reasoning = "".join(thoughts) if thoughts else None
    return Message("assistant", "".join(texts), reasoning=reasoning, tool_calls=tuple(calls), reference=reference)


def _tools(given: BodyField) -> tuple[tuple[JsonMapping, ...], tuple[str, ...]]:
    """The tools that the client runs, and a note about each ignored tool that only Anthropic's service runs."""
    tools = []
    notes = []
    for tool in given.items(optional=True):
        kind = tool["type"].value or "custom"
        if (note := hosted_tool_note(kind, HOSTED, "Anthropic")) is not None:
            notes.append(note)
        elif kind != "custom":
            raise tool["type"].bad("only tools with a name and an input_schema are offered here: declare it as one")
        else:
            tools.append(tool.function_tool(tool["name"].name(), tool["input_schema"]))
    return tuple(tools), tuple(notes)


def _tool_choice(choice: BodyField, tools: tuple[JsonMapping, ...]) -> tuple[str, bool]:
    if choice.value is None:
        return "auto", True
    parallel = not choice["disable_parallel_tool_use"].flag()
    match choice["type"].value:
        case "auto" | "none" as kind:
            return kind, parallel
        case "any":
            return "required", parallel
        case "tool":
            return choice.tool_name(choice["name"], function_names(tools)), parallel
    raise choice["type"].bad("must be auto, any, tool or none")


def _head(asked: Asked, reference: str) -> JsonObject:
    return {
        "id": f"msg_{reference}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "stop_sequence": None,
    }
