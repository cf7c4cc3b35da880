"""OpenAI's Responses API as a stateless service: every request has its whole conversation.

Consecutive items of the assistant (reasoning, text, calls) are one message of the conversation. Tools in namespaces and
tools with free-text input are shown to the model as functions, and their calls are returned in the form that the client
declared. Tools that only OpenAI's service runs are ignored, with a note.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.server.dialects import request_fields
from slime.agent.server.dialects.chat_completions import PARTS, check_response_format, sampling_params
from slime.agent.server.dialects.dialect import Asked, FinishedTurn, Problem
from slime.agent.server.dialects.errors import ErrorResponse, responses_problem
from slime.agent.server.dialects.request_fields import bad_field
from slime.agent.server.dialects.response_items import (
    ResponseContext,
    ResponseWriter,
    ToolForms,
    turn_reference,
    whole_response,
)
from slime.storage.json_types import JsonMapping, JsonObject

USED = frozenset(
    {"model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "stream", "max_output_tokens"}
    | {"temperature", "top_p", "top_k", "text", "include", "metadata", "previous_response_id", "conversation", "prompt"}
    | {"background", "top_logprobs"}
)
# Accepted and ignored: the identity of the client, billing, caching and storage (nothing is stored here, for any value
# of `store`), hints about effort, and limits on tools that only OpenAI's service runs.
NEUTRAL = frozenset(
    {
        "store",
        "stream_options",
        "reasoning",
        "service_tier",
        "truncation",
        "user",
        "safety_identifier",
        "prompt_cache_key",
    }
    | {"prompt_cache_options", "prompt_cache_retention", "max_tool_calls", "context_management", "client_metadata"}
    | {"access_programs", "moderation", "image"}
)
HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer", "tool_search")
FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_STATELESS = "nothing is kept on this side: send the whole conversation as input"
_REASONING_PARTS = frozenset({"reasoning_text", "summary_text", "text"})


class OpenAIResponses:
    name = "responses"
    paths: tuple[str, ...] = ("/v1/responses", "/v1/responses/input_tokens")

    def key(self, headers: Mapping[str, str]) -> str | None:
        return request_fields.session_key(headers)

    def asked(self, path: str, body: object, headers: Mapping[str, str]) -> Asked:
        fields = request_fields.require_object(body, "the body")
        request_fields.refuse_unknown_fields(fields, USED, NEUTRAL)
        _check_response_features(fields)
        counting = path.rstrip("/").endswith("/input_tokens")
        tools = _Tools(fields.get("tools"))
        forms = ToolForms(tools.spaces, frozenset(tools.custom))
        request = TurnRequest(
            messages=_conversation(fields.get("instructions"), fields.get("input")),
            tools=tuple(tools.functions),
            tool_choice=tools.choice(fields.get("tool_choice")),
            parallel_tool_calls=request_fields.flag_field(fields, "parallel_tool_calls", True),
            max_tokens=request_fields.int_field(fields, "max_output_tokens", 1),
            params=sampling_params({name: fields.get(name) for name in ("temperature", "top_p", "top_k")}),
        )
        model = request_fields.require_name(fields.get("model"), "model")
        stream = request_fields.flag_field(fields, "stream", False)
        echo: JsonObject = {}
        if fields.get("metadata") is not None:
            metadata = request_fields.require_object(fields["metadata"], "metadata")
            echo["metadata"] = request_fields.plain(dict(metadata), "metadata")
        for name in ("temperature", "top_p"):
            if (number := request_fields.number_field(fields, name)) is not None:
                echo[name] = number
        return Asked(
            request=request,
            model=model,
            stream=stream and not counting,
            count_only=counting,
            notes=(*tools.notes, *request_fields.choice_notes(request.tool_choice)),
            own=ResponseContext(forms, echo),
        )

    def writer(self, asked: Asked, turn_ref: str) -> ResponseWriter:
        return ResponseWriter(asked, turn_ref)

    def whole(self, asked: Asked, finished: FinishedTurn) -> JsonObject:
        return whole_response(asked, finished)

    def counted(self, tokens: int) -> JsonObject:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def problem(self, problem: Problem) -> ErrorResponse:
        return responses_problem(problem)


class _Tools:
    """The tools of a request, each converted to a function with one name."""

    def __init__(self, value: object) -> None:
        self.functions: list[JsonMapping] = []
        self.spaces: dict[str, tuple[str, str]] = {}
        self.custom: set[str] = set()
        self.notes: list[str] = []
        for i, entry in enumerate(request_fields.require_list(value or [], "tools")):
            where = f"tools[{i}]"
            tool = request_fields.require_object(entry, where)
            if tool.get("type") == "namespace":
                space = request_fields.require_name(tool.get("name"), f"{where}.name")
                for k, inner in enumerate(request_fields.require_list(tool.get("tools") or [], f"{where}.tools")):
                    place = f"{where}.tools[{k}]"
                    self._tool(request_fields.require_object(inner, place), place, space)
            else:
                self._tool(tool, where, None)

    def choice(self, value: object) -> str:
        """The tool choice of the request: "auto", "none", "required" or the name of a tool."""
        if value is None:
            return "auto"
        if isinstance(value, str):
            if value not in ("auto", "none", "required"):
                raise bad_field("tool_choice", 'must be "auto", "none", "required" or a function')
            return value
        choice = request_fields.require_object(value, "tool_choice")
        if choice.get("type") not in ("function", "custom"):
            raise bad_field("tool_choice.type", 'must be "function" or "custom"')
        return request_fields.named_tool_choice(choice.get("name"), self.functions)

    def _tool(self, tool: JsonMapping, where: str, space: str | None) -> None:
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith(HOSTED):
            self.notes.append(
                f"the tool {request_fields.replace_surrogates(kind)!r} is run by OpenAI's service and is ignored here"
            )
            return
        if kind not in ("function", "custom"):
            raise bad_field(f"{where}.type", "only function, custom and namespace tools are offered here")
        name = request_fields.require_name(tool.get("name"), f"{where}.name")
        flat = flat_name(space, name)
        schema = FREE_TEXT if kind == "custom" else tool.get("parameters")
        self.functions.append(request_fields.function_tool(flat, tool.get("description"), schema, where))
        if kind == "custom":
            self.custom.add(flat)
        if space is not None:
            self.spaces[flat] = (space, name)


def flat_name(space: str | None, name: str) -> str:
    """The function name that the model sees for a tool of a namespace."""
    if not space:
        return name
    return space + name if space.endswith("__") else f"{space}__{name}"


def _conversation(instructions: object, value: object) -> tuple[Message, ...]:
    messages: list[Message] = []
    if instructions is not None and (text := request_fields.require_text(instructions, "instructions")):
        messages.append(Message("system", text))
    before = len(messages)
    if isinstance(value, str):
        messages.append(Message("user", request_fields.replace_surrogates(value)))
    else:
        for i, entry in enumerate(request_fields.require_list(value, "input")):
            item = request_fields.require_object(entry, f"input[{i}]")
            if (message := _item(item, f"input[{i}]")) is not None:
                request_fields.add_message(messages, message)
    if len(messages) == before:
        raise bad_field("input", "must have at least one item")
    return tuple(messages)


def _item(item: JsonMapping, where: str) -> Message | None:
    """Convert one item to a message or a part of one; None for items that only OpenAI's service produces."""
    kind = item.get("type") or "message"
    match kind:
        case "message":
            role, content, place = item.get("role"), item.get("content"), f"{where}.content"
            if role == "assistant":
                reference = turn_reference(request_fields.text_field(item, "id", where))
                text = request_fields.content_text(content, place, PARTS, between="")
                return Message("assistant", text, reference=reference)
            if role not in ("system", "developer", "user"):
                raise bad_field(f"{where}.role", "must be system, developer, user or assistant")
            return Message("user" if role == "user" else "system", request_fields.content_text(content, place, PARTS))
        case "reasoning":
            texts = [
                request_fields.content_text(item.get(name), f"{where}.{name}", _REASONING_PARTS)
                for name in ("content", "summary")
            ]
            # clients that keep only `encrypted_content` keep the turn's reference with it
            reference = request_fields.text_field(item, "encrypted_content", where) or turn_reference(
                request_fields.text_field(item, "id", where)
            )
            return Message("assistant", reasoning=texts[0] or texts[1] or None, reference=reference)
        case "function_call" | "custom_tool_call":
            space = request_fields.text_field(item, "namespace", where)
            name = flat_name(space, request_fields.require_text(item.get("name"), f"{where}.name"))
            if kind == "custom_tool_call":
                given = request_fields.require_text(item.get("input"), f"{where}.input")
                arguments = json.dumps({"input": given}, ensure_ascii=False)
            else:
                arguments = request_fields.as_json_text(item.get("arguments"), f"{where}.arguments")
            call = ToolCall(request_fields.require_text(item.get("call_id"), f"{where}.call_id"), name, arguments)
            reference = turn_reference(request_fields.text_field(item, "id", where))
            return Message("assistant", tool_calls=(call,), reference=reference)
        case "function_call_output" | "custom_tool_call_output":
            text = request_fields.result_text(item.get("output"), f"{where}.output", PARTS)
            return Message(
                "tool", text, tool_call_id=request_fields.require_text(item.get("call_id"), f"{where}.call_id")
            )
        case "item_reference":
            raise bad_field(where, _STATELESS)
        case str() if kind.startswith(HOSTED):
            return None
    raise bad_field(f"{where}.type", "only messages, reasoning, calls and their outputs are read here")


def _check_response_features(fields: JsonMapping) -> None:
    for name in ("previous_response_id", "conversation"):
        if fields.get(name):
            raise bad_field(name, _STATELESS)
    if fields.get("prompt"):
        raise bad_field("prompt", "stored prompts are OpenAI's: send the text itself as instructions and input")
    if request_fields.flag_field(fields, "background", False):
        raise bad_field("background", "answers come with their request: leave it out")
    wanted = request_fields.require_list(fields.get("include") or [], "include")
    if "message.output_text.logprobs" in wanted or request_fields.int_field(fields, "top_logprobs", 0):
        raise bad_field("include", "only chat completions return log-probs: leave it out")
    check_response_format(request_fields.require_object(fields.get("text") or {}, "text").get("format"), "text.format")
