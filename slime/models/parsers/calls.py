"""Tool calls: the base class of formats, the emitter of call events, and values typed by the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence

from slime.models.parsers.events import CallArguments, CallBegun, CallEnded, Event
from slime.models.parsers.json_stream import (
    json_kind,
    object_text,
    read_json_object,
    read_json_string,
    read_json_value,
)
from slime.models.parsers.scanner import Steps, TextReader, UnreadableCall
from slime.storage.json_types import JsonMapping

_LONGEST_NAME = 256
_NAME = re.compile(r"[\w.:/-]*")
_IGNORED = {"id": re.compile(r"[\w.:-]*", re.ASCII), "type": re.compile("function")}
"""Keys of a call, next to its name and arguments, that are accepted and ignored."""
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}


class Calls:
    """Emits the events of one answer's calls.

    Invariant: at most one call is open, and the reader remembers the text of that call.
    """

    def __init__(self, reader: TextReader, events: list[Event], ids: Callable[[], str]) -> None:
        self._reader, self._events, self._ids = reader, events, ids
        self.open: int | None = None
        self.ended = 0
        self._next = 0
        self._has_arguments = False

    def begin(self, name: str) -> None:
        if not name or len(name) > _LONGEST_NAME:
            raise UnreadableCall("the name of the tool is missing" if not name else "the name of the tool is too long")
        self.open, self._next, self._has_arguments = self._next, self._next + 1, False
        self._events.append(CallBegun(self.open, self._ids(), name))

    def arguments(self, text: str) -> None:
        """Emit a piece of the arguments object, which excludes its closing brace."""
        assert self.open is not None
        if text:
            self._has_arguments = True
            self._events.append(CallArguments(self.open, text))

    def argument(self, name: str, value: str) -> None:
        """Emit one member of the arguments object; `value` is JSON text."""
        member = f"{json.dumps(name, ensure_ascii=False)}: {value}"
        self.arguments((", " if self._has_arguments else "{") + member)

    def end(self) -> None:
        """Close the call, which was read to its end."""
        assert self.open is not None
        self._events.append(CallArguments(self.open, "}" if self._has_arguments else "{}"))
        self._events.append(CallEnded(self.open))
        self.open = None
        self.ended += 1
        self._reader.begin()

    def take_back(self) -> int | None:
        """Retract the open call, which cannot be parsed; returns its index, None if no call is open."""
        index, self.open = self.open, None
        return index


class ParameterSchemas:
    """Parameter types of tools (function schemas in OpenAI's form), for formats that write values without quotes."""

    def __init__(self, tools: Sequence[JsonMapping]) -> None:
        self._properties: dict[str, JsonMapping] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                parameters = function.get("parameters")
                properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
                self._properties[function["name"]] = properties if isinstance(properties, Mapping) else {}

    def __contains__(self, name: object) -> bool:
        return name in self._properties

    def __bool__(self) -> bool:
        return bool(self._properties)

    def value(self, tool: str, parameter: str, text: str) -> str:
        """Convert an unquoted value to JSON text, by the type of the parameter.

        The value is a string if the schema says so, does not have the parameter, or has a type that does not fit.
        """
        types = _schema_types(self._properties.get(tool, {}).get(parameter))
        word = text.strip()
        if "null" in types and word.lower() in ("null", "none"):
            return "null"
        if "string" in types or not types:
            return json_string_text(text)
        if "boolean" in types and word.lower() in ("true", "false"):
            return word.lower()
        kind = json_kind(word)
        return word if kind in types or (kind == "integer" and "number" in types) else json_string_text(text)


def json_string_text(text: str) -> str:
    """The JSON text of a string."""
    return json.dumps(text, ensure_ascii=False)


def _schema_types(schema: object, depth: int = 0) -> set[str]:
    """The JSON types that a schema allows; empty if it specifies none."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set()
    if isinstance(given, list):
        types = {each for each in given if isinstance(each, str)}
    if not types and isinstance(schema.get("enum"), list):
        types = {_JSON_TYPES.get(type(each), "null") for each in schema["enum"]}
    for union in ("anyOf", "oneOf", "allOf"):
        if not types and isinstance(schema.get(union), list):
            types = set().union(*(_schema_types(each, depth + 1) for each in schema[union]))
    if not types and ("properties" in schema or "items" in schema):
        types = {"object" if "properties" in schema else "array"}
    return types


class ToolFormat:
    """Base of the tool-call formats of model families.

    `begins`: marks that begin a call. `bare`: characters that may begin a call without a mark, if no text precedes it.
    `opens` and `closes`: marks around several calls. `tails`: tokens that end an answer. `read` continues after a mark
    ("" for a bare call) and raises `UnreadableCall` if no call follows.
    """

    begins: Sequence[str] = ()
    bare: str = ""
    opens: Sequence[str] = ()
    closes: Sequence[str] = ()
    tails: Sequence[str] = ()

    def __init__(self, tools: Sequence[JsonMapping]) -> None:
        self.schemas = ParameterSchemas(tools)

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        raise NotImplementedError

    def opening(self, name: str | None) -> str:
        """The text that begins a call of the tool with this name, or of any tool if `name` is None."""
        raise NotImplementedError


def read_closing_mark(reader: TextReader, mark: str) -> Steps[None]:
    """Read the mark that ends a call; it may be absent at the end of the answer."""
    if (yield from reader.next()):
        yield from reader.require(mark)


def read_tool_name(reader: TextReader) -> Steps[str]:
    """Read a name without quotes."""
    yield from reader.next()
    return (yield from reader.run(_NAME, _LONGEST_NAME))


def call_object_opening(name: str | None, arguments: str = "arguments") -> str:
    """The beginning of a call that `read_call_object` reads."""
    return '{"name": "' if name is None else f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '


def read_call_object(reader: TextReader, calls: Calls, known: Container[str] | None = None) -> Steps[None]:
    """Read `{"name": ..., "arguments": {...}}`, only with names in `known` unless that is None; the call stays open.

    `parameters` is accepted instead of `arguments`.
    """
    if (yield from reader.next()) != "{":
        raise UnreadableCall("a call must be a JSON object")
    reader.at += 1
    early: list[str] = []  # arguments before the name
    seen: set[str] = set()
    while True:
        key = yield from read_json_string(reader)
        if (yield from reader.next()) != ":":
            raise UnreadableCall("invalid JSON: expected a colon")
        reader.at += 1
        key = "arguments" if key == "parameters" else key
        if key in seen:
            raise UnreadableCall(f"duplicate key {key!r}")
        seen.add(key)
        if key == "name":
            name = yield from read_json_string(reader)
            if known is not None and name not in known:
                raise UnreadableCall("there is no such tool")
            calls.begin(name)
            calls.arguments("".join(early))
        elif key == "arguments":
            yield from _read_arguments(reader, early.append if calls.open is None else calls.arguments)
        elif key not in _IGNORED or not _IGNORED[key].fullmatch((yield from read_json_string(reader))):
            raise UnreadableCall(f"a call has no key {key!r}")
        character = yield from reader.next()
        if character not in (",", "}"):
            raise UnreadableCall("invalid JSON: expected a comma or }")
        reader.at += 1
        if character == "}":
            break
    if calls.open is None:
        raise UnreadableCall("the name of the tool is missing")


def _read_arguments(reader: TextReader, tell: Callable[[str], None]) -> Steps[None]:
    """Read the arguments: an object, a string that holds the text of one, or null."""
    character = yield from reader.next()
    if character == '"':
        text = object_text((yield from read_json_string(reader)))
        if text is None:
            raise UnreadableCall("the arguments must be a JSON object")
        tell(text[:-1])
    elif character == "n":
        yield from read_json_value(reader, lambda _: None)
    else:
        yield from read_json_object(reader, tell)
