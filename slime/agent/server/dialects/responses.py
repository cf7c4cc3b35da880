"""OpenAI's Responses API as a stateless service: every request has its whole conversation.

Consecutive items of the assistant (reasoning, text, calls) are one message of the conversation. Tools in namespaces and
tools with free-text input are shown to the model as functions, and their calls are returned in the form that the client
declared. Tools that only OpenAI's service runs are ignored, with a note.

The id of every output item contains the turn's reference and the item's index, and a reasoning item also has the
reference as its `encrypted_content`: whichever of them a client sends back, its turn is identified.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from slime.agent.messages import Message, ToolCall, TurnRequest
from slime.agent.server.dialects.chat_completions import PARTS, check_response_format
from slime.agent.server.dialects.dialect import (
    Asked,
    Dialect,
    FinishedTurn,
    StreamWriter,
    ascii_json,
    has_visible_text,
    sse_named,
)
from slime.agent.server.dialects.errors import Problem, openai_message, stream_code
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


_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_(.+)\.\d+", re.DOTALL)


@dataclass(frozen=True)
class ResponseContext:
    """State of a request that its answer needs: the forms of its tools, and fields that the response repeats."""

    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The model's names of tools in namespaces: the namespace and the name in it."""
    custom: frozenset[str] = frozenset()
    """The model's names of tools whose input is free text."""
    echo: JsonMapping = field(default_factory=dict)


class ResponseWriter(StreamWriter):
    """Streams one response; its events are numbered from 0."""

    def __init__(self, asked: Asked, turn_ref: str) -> None:
        super().__init__(asked, turn_ref)
        self._items = _OutputItems(asked, turn_ref)
        self._open: type | int | None = None  # the kind of the open item, or the number of its call
        self._number = 0

    def begin(self) -> bytes:
        response = _response(self._asked, self._reference, "in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def encode(self, shown: Event) -> bytes:
        if isinstance(shown, CallArguments):
            self._items.add(shown.text)
            if self._items.is_custom:
                return b""
            return self._event("response.function_call_arguments.delta", delta=shown.text, **self._items.place)
        encoded = b""
        what = shown.index if isinstance(shown, CallBegun) else type(shown)
        if self._open != what:
            encoded += self._close()
            item = self._items.begin(shown)
            encoded += self._event("response.output_item.added", output_index=self._items.index, item=item)
            if not isinstance(shown, CallBegun):
                part, place = _content_part(item["type"], ""), self._items.place
                encoded += self._event("response.content_part.added", part=part, content_index=0, **place)
        self._open = what
        if isinstance(shown, Reasoning | Text):
            self._items.add(shown.text)
            place = {**self._items.place, "content_index": 0}
            if isinstance(shown, Reasoning):
                encoded += self._event("response.reasoning_text.delta", delta=shown.text, **place)
            else:
                encoded += self._event("response.output_text.delta", delta=shown.text, logprobs=[], **place)
        return encoded

    def end(self, finished: FinishedTurn) -> bytes:
        closed = self._close()
        response = _finished_response(self._asked, finished, self._items.done)
        return closed + self._event(f"response.{response['status']}", response=response)

    def problem(self, problem: Problem) -> bytes:
        error = {"code": stream_code(problem), "message": openai_message(problem)}
        response = _response(self._asked, self._reference, "failed", self._items.done)
        return self._event("response.failed", response={**response, "error": error})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        place = self._items.place
        item = self._items.finish()
        match item["type"]:
            case "function_call":
                said = self._event(
                    "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"], **place
                )
            case "custom_tool_call":
                said = self._event("response.custom_tool_call_input.delta", delta=item["input"], **place)
                said += self._event("response.custom_tool_call_input.done", input=item["input"], **place)
            case kind:
                part = item["content"][0]
                name = "response.reasoning_text.done" if kind == "reasoning" else "response.output_text.done"
                more: JsonObject = {} if kind == "reasoning" else {"logprobs": []}
                said = self._event(name, text=part["text"], content_index=0, **place, **more)
                said += self._event("response.content_part.done", part=part, content_index=0, **place)
        return said + self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _event(self, kind: str, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse_named(event)


class OpenAIResponses(Dialect):
    name = "responses"
    paths = ("/v1/responses", "/v1/responses/input_tokens")
    writer = ResponseWriter

    def asked(self, path: str, body: object) -> Asked:
        fields = BodyField(body)
        fields.refuse_unknown_fields(USED, NEUTRAL)
        _check_response_features(fields)
        counting = path.rstrip("/").endswith("/input_tokens")
        tools = _Tools(fields["tools"])
        request = TurnRequest(
            messages=_conversation(fields),
            tools=tuple(tools.functions),
            tool_choice=fields["tool_choice"].tool_choice(function_names(tools.functions), "function", "custom"),
            parallel_tool_calls=fields["parallel_tool_calls"].flag(True),
            max_tokens=fields["max_output_tokens"].whole(1),
            params=fields.sampling_params(("temperature", "top_p"), {"top_k": ("top_k", -1)}),
        )
        model, stream = fields["model"].name(), fields["stream"].flag()
        echo: JsonObject = {}
        if "metadata" in fields:
            fields["metadata"].object()
            echo["metadata"] = fields["metadata"].plain()
        echo |= {name: request.params[name] for name in ("temperature", "top_p") if name in request.params}
        return Asked(
            request=request,
            model=model,
            stream=stream and not counting,
            count_only=counting,
            notes=(*tools.notes, *choice_notes(request.tool_choice)),
            own=ResponseContext(tools.spaces, frozenset(tools.custom), echo),
        )

    def whole(self, asked: Asked, finished: FinishedTurn) -> JsonObject:
        items = _OutputItems(asked, finished.reference)
        output = finished.output
        if has_visible_text(output.reasoning):
            items.begin(Reasoning(""))
            items.add(output.reasoning or "")
        if has_visible_text(output.text):
            items.begin(Text(""))
            items.add(output.text)
        for i, call in enumerate(output.calls):
            items.begin(CallBegun(i, call.id, call.name))
            items.add(call.arguments)
        items.finish()
        return _finished_response(asked, finished, items.done)

    def counted(self, tokens: int) -> JsonObject:
        return {"object": "response.input_tokens", "input_tokens": tokens}


class _OutputItems:
    """Builds the output items one after the other: `begin`, `add` text, `finish`."""

    def __init__(self, asked: Asked, reference: str) -> None:
        self.done: list[JsonObject] = []
        self._forms = asked.own if isinstance(asked.own, ResponseContext) else ResponseContext()
        self._reference = reference
        self._item: JsonObject | None = None
        self._texts: list[str] = []

    @property
    def index(self) -> int:
        return len(self.done)

    @property
    def place(self) -> JsonObject:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": self.index}

    @property
    def is_custom(self) -> bool:
        return self._item is not None and self._item["type"] == "custom_tool_call"

    def begin(self, event: Event) -> JsonObject:
        self.finish()
        match event:
            case Reasoning():
                self._item = {"type": "reasoning", "id": self._id("rs"), "summary": [], "content": []}
                self._item["encrypted_content"] = self._reference
            case Text():
                self._item = {"type": "message", "id": self._id("msg"), "role": "assistant", "content": []}
            case CallBegun():
                space, name = self._forms.spaces.get(event.name, (None, event.name))
                if event.name in self._forms.custom:
                    self._item = {"type": "custom_tool_call", "id": self._id("ctc"), "call_id": event.id, "name": name}
                    self._item["input"] = ""
                else:
                    self._item = {"type": "function_call", "id": self._id("fc"), "call_id": event.id, "name": name}
                    self._item["arguments"] = ""
                if space is not None:
                    self._item["namespace"] = space
            case _:
                raise AssertionError(event)
        self._item["status"] = "in_progress"
        return self._item

    def add(self, text: str) -> None:
        self._texts.append(text)

    def finish(self) -> JsonObject:
        """Complete the open item and return it; {} if no item is open."""
        if self._item is None:
            return {}
        item, text = {**self._item, "status": "completed"}, "".join(self._texts)
        match item["type"]:
            case "function_call":
                item["arguments"] = text or "{}"
            case "custom_tool_call":
                given = parsed_arguments(text).get("input", text)
                item["input"] = given if isinstance(given, str) else ascii_json(given)
            case kind:
                item["content"] = [_content_part(kind, text)]
        self.done.append(item)
        self._item, self._texts = None, []
        return item

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._reference}.{self.index}"


def _content_part(kind: str, text: str) -> JsonObject:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _finished_response(asked: Asked, finished: FinishedTurn, items: list[JsonObject]) -> JsonObject:
    """The response of a finished turn; a turn that was cut off is incomplete, and so is its last item."""
    usage = finished.usage
    if finished.is_cut and items:
        items = [*items[:-1], {**items[-1], "status": "incomplete"}]
    response = _response(asked, finished.reference, "incomplete" if finished.is_cut else "completed", items)
    response["usage"] = {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
    if finished.is_cut:
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    return response


def _response(asked: Asked, reference: str, status: str, items: list[JsonObject] | None = None) -> JsonObject:
    echo = asked.own.echo if isinstance(asked.own, ResponseContext) else {}
    return {
        "id": f"resp_{reference}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": asked.model,
        "output": items or [],
        "parallel_tool_calls": asked.request.parallel_tool_calls,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "max_output_tokens": asked.request.max_tokens,
        "usage": None,
        **echo,
    }


class _Tools:
    """The tools of a request, each converted to a function with one name."""

    def __init__(self, given: BodyField) -> None:
        self.functions: list[JsonMapping] = []
        self.spaces: dict[str, tuple[str, str]] = {}
        self.custom: set[str] = set()
        self.notes: list[str] = []
        for tool in given.items(optional=True):
            if tool["type"].value == "namespace":
                space = tool["name"].name()
                for inner in tool["tools"].items(optional=True):
                    self._add(inner, space)
            else:
                self._add(tool, None)

    def _add(self, tool: BodyField, space: str | None) -> None:
        kind = tool["type"].value
        if (note := hosted_tool_note(kind, HOSTED, "OpenAI")) is not None:
            self.notes.append(note)
            return
        if kind not in ("function", "custom"):
            raise tool["type"].bad("only function, custom and namespace tools are offered here")
        name = tool["name"].name()
        flat = flat_name(space, name)
        schema = BodyField(FREE_TEXT) if kind == "custom" else tool["parameters"]
        self.functions.append(tool.function_tool(flat, schema))
        if kind == "custom":
            self.custom.add(flat)
        if space is not None:
            self.spaces[flat] = (space, name)


def flat_name(space: str | None, name: str) -> str:
    """The function name that the model sees for a tool of a namespace."""
    if not space:
        return name
    return space + name if space.endswith("__") else f"{space}__{name}"


def _conversation(fields: BodyField) -> tuple[Message, ...]:
    messages: list[Message] = []
    if text := fields["instructions"].text(""):
        messages.append(Message("system", text))
    before = len(messages)
    given = fields["input"]
    if isinstance(given.value, str):
        messages.append(Message("user", given.text()))
    else:
        for item in given.items():
            item.object()
            if (message := _message(item)) is not None:
                add_message(messages, message)
    if len(messages) == before:
        raise given.bad("must have at least one item")
    return tuple(messages)


def _message(item: BodyField) -> Message | None:
    """Convert one item to a message or a part of one; None for items that only OpenAI's service produces."""
    kind = item["type"].value or "message"
    match kind:
        case "message":
            role, content = item["role"].value, item["content"]
            if role == "assistant":
                reference = _turn_reference(item)
                return Message("assistant", content.content(PARTS, between=""), reference=reference)
            if role not in ("system", "developer", "user"):
                raise item["role"].bad("must be system, developer, user or assistant")
            return Message("user" if role == "user" else "system", content.content(PARTS))
        case "reasoning":
            texts = [item[name].content(_REASONING_PARTS) for name in ("content", "summary")]
            # clients that keep only `encrypted_content` keep the turn's reference with it
            reference = item["encrypted_content"].optional_text() or _turn_reference(item)
            return Message("assistant", reasoning=texts[0] or texts[1] or None, reference=reference)
        case "function_call" | "custom_tool_call":
            space = item["namespace"].optional_text()
            name = flat_name(space, item["name"].text())
            if kind == "custom_tool_call":
                arguments = json.dumps({"input": item["input"].text()}, ensure_ascii=False)
            else:
                arguments = item["arguments"].json_text()
            call = ToolCall(item["call_id"].text(), name, arguments)
            return Message("assistant", tool_calls=(call,), reference=_turn_reference(item))
        case "function_call_output" | "custom_tool_call_output":
            text = item["output"].result(PARTS)
            return Message("tool", text, tool_call_id=item["call_id"].text())
        case "item_reference":
            raise item.bad(_STATELESS)
        case str() if kind.startswith(HOSTED):
            return None
    raise item["type"].bad("only messages, reasoning, calls and their outputs are read here")


def _turn_reference(item: BodyField) -> str | None:
    """The reference of the turn that an item belongs to, by its id; None for ids from elsewhere."""
    found = _ITEM_ID.fullmatch(item["id"].optional_text() or "")
    return found[1] if found else None


def _check_response_features(fields: BodyField) -> None:
    for name in ("previous_response_id", "conversation"):
        if fields[name].value:
            raise fields[name].bad(_STATELESS)
    if fields["prompt"].value:
        raise fields["prompt"].bad("stored prompts are OpenAI's: send the text itself as instructions and input")
    if fields["background"].flag():
        raise fields["background"].bad("answers come with their request: leave it out")
    wanted = [entry.value for entry in fields["include"].items(optional=True)]
    if "message.output_text.logprobs" in wanted or fields["top_logprobs"].whole(0):
        raise fields["include"].bad("only chat completions return log-probs: leave it out")
    text = BodyField(fields["text"].object(optional=True), "text")
    check_response_format(text["format"])
