"""Anthropic's Messages API, with `count_tokens`.

The turn's reference is the `signature` of its thinking block, which clients send back unchanged. `cache_control` is
dropped everywhere, a list of one text equals that text, and a `role: system` message may be at any position. Usage
follows Anthropic: `input_tokens` are the prompt tokens that were not cached; the three input counts add up to the
prompt.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.server.dialects import request_fields, sse
from slime.agent.server.dialects.dialect import Asked, FinishedTurn, Problem, Usage
from slime.agent.server.dialects.errors import ErrorResponse, anthropic_error, messages_problem
from slime.agent.server.dialects.request_fields import bad_field
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
_STOP = {"length": "max_tokens", "abort": "max_tokens"}


class AnthropicMessages:
    name = "messages"
    paths: tuple[str, ...] = ("/v1/messages", "/v1/messages/count_tokens")

    def key(self, headers: Mapping[str, str]) -> str | None:
        return request_fields.session_key(headers)

    def asked(self, path: str, body: object, headers: Mapping[str, str]) -> Asked:
        fields = request_fields.require_object(body, "the body")
        request_fields.refuse_unknown_fields(fields, USED, NEUTRAL)
        config = request_fields.require_object(fields.get("output_config") or {}, "output_config")
        if config.get("format") or fields.get("output_format"):
            raise bad_field("output_config.format", "answers are sampled freely here: leave it out")
        if fields.get("mcp_servers"):
            raise bad_field(
                "mcp_servers", "no tools are run on this side: connect to the servers yourself and send their tools"
            )
        counting = path.rstrip("/").endswith("/count_tokens")
        tools, notes = _tools(fields.get("tools"))
        choice, parallel = _tool_choice(fields.get("tool_choice"), tools)
        longest = request_fields.int_field(fields, "max_tokens", 1)
        if longest is None and not counting:
            raise bad_field("max_tokens", "must be given")
        messages = conversation(fields.get("system"), fields.get("messages"))
        params: JsonObject = {}
        for name in ("temperature", "top_p"):
            if (number := request_fields.number_field(fields, name)) is not None:
                params[name] = number
        if (most := request_fields.int_field(fields, "top_k", 0)) is not None:
            params["top_k"] = most
        if fields.get("stop_sequences") and (stop := request_fields.texts(fields["stop_sequences"], "stop_sequences")):
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
            model=request_fields.require_name(fields.get("model"), "model"),
            stream=request_fields.flag_field(fields, "stream", False) and not counting,
            count_only=counting,
            notes=notes + request_fields.choice_notes(choice),
        )

    def writer(self, asked: Asked, turn_ref: str) -> MessagesWriter:
        return MessagesWriter(asked, turn_ref)

    def whole(self, asked: Asked, finished: FinishedTurn) -> JsonObject:
        output = finished.output
        blocks: list[JsonObject] = []
        if sse.has_visible_text(output.reasoning):
            blocks.append({"type": "thinking", "thinking": output.reasoning, "signature": finished.reference})
        if sse.has_visible_text(output.text):
            blocks.append({"type": "text", "text": output.text})
        for call in output.calls:
            blocks.append(
                {
                    "type": "tool_use",
                    "id": call.id,
                    "name": call.name,
                    "input": request_fields.parsed_arguments(call.arguments),
                }
            )
        return {
            **_head(asked, finished.reference),
            "content": blocks,
            "stop_reason": stop_reason(finished),
            "usage": usage_body(finished.usage),
        }

    def counted(self, tokens: int) -> JsonObject:
        return {"input_tokens": tokens}

    def problem(self, problem: Problem) -> ErrorResponse:
        return messages_problem(problem)


class MessagesWriter:
    """Streams content blocks one after the other; the thinking block ends with the turn's reference."""

    def __init__(self, asked: Asked, turn_ref: str) -> None:
        self._asked = asked
        self._reference = turn_ref
        self._shown = sse.VisibleEvents()
        self._open: type | int | None = None  # the kind of the open block, or the number of its call
        self._blocks = 0

    def begin(self) -> bytes:
        message = {**_head(self._asked, self._reference), "content": [], "stop_reason": None}
        return sse.named({"type": "message_start", "message": {**message, "usage": usage_body(Usage(0, 0, 0))}})

    def event(self, event: Event) -> bytes:
        blocks = b""
        for shown in self._shown.of(event):
            match shown:
                case Reasoning():
                    blocks += self._start(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                    blocks += self._delta({"type": "thinking_delta", "thinking": shown.text})
                case Text():
                    blocks += self._start(Text, {"type": "text", "text": ""})
                    blocks += self._delta({"type": "text_delta", "text": shown.text})
                case CallBegun():
                    block = {"type": "tool_use", "id": shown.id, "name": shown.name, "input": {}}
                    blocks += self._start(shown.index, block)
                case CallArguments():
                    blocks += self._delta({"type": "input_json_delta", "partial_json": shown.text})
                case _:
                    raise AssertionError(shown)
        return blocks

    def keep_alive(self) -> bytes:
        return sse.named({"type": "ping"})

    def end(self, finished: FinishedTurn) -> bytes:
        delta = {"stop_reason": stop_reason(finished), "stop_sequence": None}
        last = {"type": "message_delta", "delta": delta, "usage": usage_body(finished.usage)}
        return self._close() + sse.named(last) + sse.named({"type": "message_stop"})

    def problem(self, problem: Problem) -> bytes:
        return sse.named(anthropic_error(problem))

    def _start(self, what: type | int, block: JsonMapping) -> bytes:
        if self._open == what:
            return b""
        closed = self._close()
        self._open = what
        return closed + sse.named({"type": "content_block_start", "index": self._blocks, "content_block": block})

    def _delta(self, delta: JsonMapping) -> bytes:
        return sse.named({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is Reasoning:
            signed = self._delta({"type": "signature_delta", "signature": self._reference})
        stop = sse.named({"type": "content_block_stop", "index": self._blocks})
        self._open = None
        self._blocks += 1
        return signed + stop


def stop_reason(finished: FinishedTurn) -> str:
    """The stop reason; `max_tokens` for a turn that was cut off, even inside a call."""
    return _STOP.get(finished.finish_reason) or ("tool_use" if finished.output.calls else "end_turn")


def usage_body(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def conversation(system: object, value: object) -> tuple[Message, ...]:
    """The system prompt and the messages; consecutive assistant messages are merged."""
    messages: list[Message] = []
    if instructions := request_fields.content_text(system, "system", ("text",)):
        messages.append(Message("system", instructions))
    for i, entry in enumerate(request_fields.require_list(value, "messages")):
        fields = request_fields.require_object(entry, f"messages[{i}]")
        content, place = fields.get("content"), f"messages[{i}].content"
        match fields.get("role"):
            case "system":
                added = [Message("system", request_fields.content_text(content, place, ("text",)))]
            case "assistant":
                added = [_assistant(content, place)]
            case "user":
                added = _user(content, place)
            case _:
                raise bad_field(f"messages[{i}].role", "must be user, assistant or system")
        for message in added:
            request_fields.add_message(messages, message)
    if not any(message.role != "system" for message in messages):
        raise bad_field("messages", "must have at least one message")
    if messages[-1].role == "assistant":
        raise bad_field("messages", "must end with a message of the user: prefilled answers are not supported")
    return tuple(messages)


def _user(content: object, where: str) -> list[Message]:
    """The messages of a user entry, in the order of its blocks: tool results, and adjacent texts as one message."""
    if not isinstance(content, list):
        return [Message("user", request_fields.content_text(content, where, ("text",)))]
    messages: list[Message] = []
    texts: list[str] = []
    for i, entry in enumerate(content):
        place = f"{where}[{i}]"
        if isinstance(entry, dict) and entry.get("type") == "tool_result":
            if texts:
                messages.append(Message("user", "\n".join(texts)))
                texts = []
            result = request_fields.result_text(entry.get("content"), f"{place}.content", ("text",))
            if request_fields.flag_field(entry, "is_error", False) and not result.strip():
                result = "Error: the tool failed and said nothing."
            call_id = request_fields.require_text(entry.get("tool_use_id"), f"{place}.tool_use_id")
            messages.append(Message("tool", result, tool_call_id=call_id))
        else:
            texts.append(request_fields.part_text(entry, place, ("text",)))
    if texts or not messages:
        messages.append(Message("user", "\n".join(texts)))
    return messages


def _assistant(content: object, where: str) -> Message:
    if not isinstance(content, list):
        return Message("assistant", request_fields.content_text(content, where, ("text",)))
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    reference = None
    for i, entry in enumerate(content):
        place = f"{where}[{i}]"
        block = request_fields.require_object(entry, place)
        match block.get("type"):
            case "thinking":
                thoughts.append(request_fields.require_text(block.get("thinking"), f"{place}.thinking"))
                reference = reference or request_fields.text_field(block, "signature", place) or None
            case "redacted_thinking":
                reference = reference or request_fields.text_field(block, "data", place) or None
            case "tool_use":
                call_id = request_fields.require_text(block.get("id"), f"{place}.id")
                name = request_fields.require_text(block.get("name"), f"{place}.name")
                calls.append(ToolCall(call_id, name, request_fields.as_json_text(block.get("input"), f"{place}.input")))
            case _:
                texts.append(request_fields.part_text(block, place, ("text",)))
    reasoning = "".join(thoughts) if thoughts else None
    return Message("assistant", "".join(texts), reasoning=reasoning, tool_calls=tuple(calls), reference=reference)


def _tools(value: object) -> tuple[tuple[JsonMapping, ...], tuple[str, ...]]:
    """The tools that the client runs, and a note about each ignored tool that only Anthropic's service runs."""
    tools = []
    notes = []
    for i, entry in enumerate(request_fields.require_list(value or [], "tools")):
        where = f"tools[{i}]"
        tool = request_fields.require_object(entry, where)
        kind = tool.get("type") or "custom"
        if isinstance(kind, str) and kind.startswith(HOSTED):
            notes.append(
                f"the tool {request_fields.replace_surrogates(kind)!r} is run by Anthropic's service and is ignored "
                "here"
            )
            continue
        if kind != "custom":
            raise bad_field(
                f"{where}.type", "only tools with a name and an input_schema are offered here: declare it as one"
            )
        tools.append(
            request_fields.function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)
        )
    return tuple(tools), tuple(notes)


def _tool_choice(value: object, tools: tuple[JsonMapping, ...]) -> tuple[str, bool]:
    if value is None:
        return "auto", True
    choice = request_fields.require_object(value, "tool_choice")
    parallel = not request_fields.flag_field(choice, "disable_parallel_tool_use", False)
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind, parallel
        case "any":
            return "required", parallel
        case "tool":
            return request_fields.named_tool_choice(choice.get("name"), tools), parallel
    raise bad_field("tool_choice.type", "must be auto, any, tool or none")


def _head(asked: Asked, reference: str) -> JsonObject:
    return {
        "id": f"msg_{reference}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "stop_sequence": None,
    }
