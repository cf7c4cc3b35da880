"""Builds answers of OpenAI's Responses API: output items, the response object, and the stream of both.

The id of every item contains the turn's reference and the item's index, and a reasoning item also has the reference as
its `encrypted_content`: whichever of them a client sends back, its turn is identified.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from slime.agent.server.dialects import request_fields, sse
from slime.agent.server.dialects.dialect import Asked, FinishedTurn, Problem, Usage
from slime.agent.server.dialects.errors import openai_message, stream_code
from slime.models.parsers.events import CallArguments, CallBegun, Event, Reasoning, Text
from slime.storage.json_types import JsonMapping, JsonObject

_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_(.+)\.\d+", re.DOTALL)


@dataclass(frozen=True)
class ToolForms:
    """Maps the function names that the model sees to the forms in which the client declared its tools."""

    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # the model's name: namespace and name in it
    custom: frozenset[str] = frozenset()  # the model's names of tools whose input is free text


@dataclass(frozen=True)
class ResponseContext:
    """State of a request that its answer needs: the forms of its tools, and fields that the response repeats."""

    forms: ToolForms
    echo: JsonMapping


def turn_reference(item_id: str | None) -> str | None:
    """The reference of the turn that an item id belongs to; None for ids from elsewhere."""
    found = _ITEM_ID.fullmatch(item_id or "")
    return found[1] if found else None


def usage_body(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def whole_response(asked: Asked, finished: FinishedTurn) -> JsonObject:
    items = _OutputItems(asked, finished.reference)
    output = finished.output
    if sse.has_visible_text(output.reasoning):
        items.begin(Reasoning(""))
        items.add(output.reasoning or "")
    if sse.has_visible_text(output.text):
        items.begin(Text(""))
        items.add(output.text)
    for i, call in enumerate(output.calls):
        items.begin(CallBegun(i, call.id, call.name))
        items.add(call.arguments)
    items.finish()
    return _finished_response(asked, finished, items.done)


class ResponseWriter:
    """Streams one response; its events are numbered from 0."""

    def __init__(self, asked: Asked, turn_ref: str) -> None:
        self._asked = asked
        self._reference = turn_ref
        self._items = _OutputItems(asked, turn_ref)
        self._shown = sse.VisibleEvents()
        self._open: type | int | None = None  # the kind of the open item, or the number of its call
        self._number = 0

    def begin(self) -> bytes:
        response = _response(self._asked, self._reference, "in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def event(self, event: Event) -> bytes:
        encoded = b""
        for shown in self._shown.of(event):
            if isinstance(shown, CallArguments):
                self._items.add(shown.text)
                if not self._items.is_custom:
                    name = "response.function_call_arguments.delta"
                    encoded += self._event(name, delta=shown.text, **self._items.place)
                continue
            what = shown.index if isinstance(shown, CallBegun) else type(shown)
            if self._open != what:
                encoded += self._close()
                item = self._items.begin(shown)
                encoded += self._event("response.output_item.added", output_index=self._items.index, item=item)
                if not isinstance(shown, CallBegun):
                    part, place = _content_part(item["type"], ""), self._items.place
                    encoded += self._event("response.content_part.added", part=part, content_index=0, **place)
            self._open = what
            if isinstance(shown, CallBegun):
                continue
            text = shown.text if isinstance(shown, Reasoning | Text) else ""
            self._items.add(text)
            place = {**self._items.place, "content_index": 0}
            if isinstance(shown, Reasoning):
                encoded += self._event("response.reasoning_text.delta", delta=text, **place)
            else:
                encoded += self._event("response.output_text.delta", delta=text, logprobs=[], **place)
        return encoded

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE_COMMENT

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
        return sse.named(event)


class _OutputItems:
    """Builds the output items one after the other: `begin`, `add` text, `finish`."""

    def __init__(self, asked: Asked, reference: str) -> None:
        self.done: list[JsonObject] = []
        self._forms = asked.own.forms if isinstance(asked.own, ResponseContext) else ToolForms()
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
                given = request_fields.parsed_arguments(text).get("input", text)
                item["input"] = given if isinstance(given, str) else sse.ascii_json(given)
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
    cut = finished.finish_reason in ("length", "abort")
    if cut and items:
        items = [*items[:-1], {**items[-1], "status": "incomplete"}]
    response = _response(asked, finished.reference, "incomplete" if cut else "completed", items)
    response["usage"] = usage_body(finished.usage)
    if cut:
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
