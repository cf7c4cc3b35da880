"""Calls on their way from a format to the events, and what a format is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from slime.models.parsers.events import CallArguments, CallBegun, CallEnded, Event
from slime.models.parsers.json_stream import json_kind, json_object, json_string, json_value, object_text
from slime.models.parsers.scanner import Reader, Steps, Unreadable

_LONGEST_NAME = 256
_NAME = re.compile(r"[\w.:/-]*")
_IGNORED = {"id": re.compile(r"[\w.:-]*", re.ASCII), "type": re.compile("function")}
"""What may stand in a call besides its name and arguments, and says nothing."""


class Calls:
    """The calls of one answer. Invariant: one is open at most, and the reader remembers the text of that one."""

    def __init__(self, reader: Reader, events: list[Event], ids: Callable[[], str]) -> None:
        self._reader, self._events, self._ids = reader, events, ids
        self.open: int | None = None
        self.ended = 0
        self._next = 0
        self._has_arguments = False

    def begin(self, name: str) -> None:
        if not name or len(name) > _LONGEST_NAME:
            raise Unreadable("the name of the tool is missing" if not name else "the name of the tool is endless")
        self.open, self._next, self._has_arguments = self._next, self._next + 1, False
        self._events.append(CallBegun(self.open, self._ids(), name))

    def arguments(self, text: str) -> None:
        """A piece of the object, without the brace that closes it."""
        assert self.open is not None
        if text:
            self._has_arguments = True
            self._events.append(CallArguments(self.open, text))

    def argument(self, name: str, value: str) -> None:
        """One member of the object; `value` is JSON text."""
        member = f"{json.dumps(name, ensure_ascii=False)}: {value}"
        self.arguments((", " if self._has_arguments else "{") + member)

    def end(self) -> None:
        """The call was read to its end."""
        assert self.open is not None
        self._events.append(CallArguments(self.open, "}" if self._has_arguments else "{}"))
        self._events.append(CallEnded(self.open))
        self.open = None
        self.ended += 1
        self._reader.begin()

    def take_back(self) -> int | None:
        """The call cannot be read; its number if it had begun."""
        index, self.open = self.open, None
        return index


class ToolFormat:
    """How a family of models writes tool calls.

    `begins` are the marks with which a call begins, `bare` the characters with which one may begin where nothing was
    said before, `opens` and `closes` marks around several calls, `tails` tokens that end an answer. `read` reads on
    after a mark ("" for a bare one) and raises `Unreadable` where that is no call.
    """

    begins: Sequence[str] = ()
    bare: str = ""
    opens: Sequence[str] = ()
    closes: Sequence[str] = ()
    tails: Sequence[str] = ()

    def read(self, mark: str, reader: Reader, calls: Calls) -> Steps[None]:
        raise NotImplementedError

    def opening(self, name: str | None) -> str:
        """The text with which a call begins, of the tool of this name or of any."""
        raise NotImplementedError


def closed(reader: Reader, mark: str) -> Steps[None]:
    """Read the mark that ends a call; an answer may end without it."""
    if (yield from reader.next()) and not (yield from reader.take(mark)):
        raise Unreadable(f"{mark} is missing")


def tool_name(reader: Reader) -> Steps[str]:
    """Read a name without quotes."""
    yield from reader.next()
    return (yield from reader.run(_NAME, _LONGEST_NAME))


def opened_object(name: str | None, arguments: str = "arguments") -> str:
    """The beginning of such a call as `named_object` reads."""
    return '{"name": "' if name is None else f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '


def named_object(reader: Reader, calls: Calls, known: Container[str] | None = None) -> Steps[None]:
    """Read `{"name": ..., "arguments": {...}}`, where only names that are `known` count; the call stays open.

    `parameters` is another word for the arguments.
    """
    if (yield from reader.next()) != "{":
        raise Unreadable("a call must be a JSON object")
    reader.at += 1
    early: list[str] = []  # arguments before the name
    seen: set[str] = set()
    while True:
        key = yield from json_string(reader)
        if (yield from reader.next()) != ":":
            raise Unreadable("this is no JSON: a colon is missing")
        reader.at += 1
        key = "arguments" if key == "parameters" else key
        if key in seen:
            raise Unreadable(f"{key!r} is there twice")
        seen.add(key)
        if key == "name":
            name = yield from json_string(reader)
            if known is not None and name not in known:
                raise Unreadable("there is no such tool")
            calls.begin(name)
            calls.arguments("".join(early))
        elif key == "arguments":
            yield from _arguments(reader, early.append if calls.open is None else calls.arguments)
        elif key not in _IGNORED or not _IGNORED[key].fullmatch((yield from json_string(reader))):
            raise Unreadable(f"{key!r} has no place in a call")
        character = yield from reader.next()
        if character not in (",", "}"):
            raise Unreadable("this is no JSON: a comma or } is missing")
        reader.at += 1
        if character == "}":
            break
    if calls.open is None:
        raise Unreadable("the name of the tool is missing")


def _arguments(reader: Reader, tell: Callable[[str], None]) -> Steps[None]:
    """Read an object, the text of one in a string, or null."""
    character = yield from reader.next()
    if character == '"':
        text = object_text((yield from json_string(reader)))
        if text is None:
            raise Unreadable("the arguments must be a JSON object")
        tell(text[:-1])
    elif character == "n":
        yield from json_value(reader, lambda _: None)
    else:
        yield from json_object(reader, tell)


# Values of formats that write them without quotes: typed by the tool's own schema.


class Schemas:
    """The types of the parameters of these tools (function schemas in OpenAI's form)."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._properties: dict[str, Mapping[str, Any]] = {}
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
        """The JSON text of what this stands for.

        A string stays one, and so does what the schema does not know or does not fit.
        """
        types = _types(self._properties.get(tool, {}).get(parameter))
        word = text.strip()
        if "null" in types and word.lower() in ("null", "none"):
            return "null"
        if "string" in types or not types:
            return as_string(text)
        if "boolean" in types and word.lower() in ("true", "false"):
            return word.lower()
        kind = json_kind(word)
        return word if kind in types or (kind == "integer" and "number" in types) else as_string(text)


def as_string(text: str) -> str:
    """The JSON text of a string."""
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, depth: int = 0) -> set[str]:
    """The JSON types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set()
    if isinstance(given, list):
        types = {each for each in given if isinstance(each, str)}
    if not types and isinstance(schema.get("enum"), list):
        types = {_kind(each) for each in schema["enum"]}
    for union in ("anyOf", "oneOf", "allOf"):
        if not types and isinstance(schema.get(union), list):
            types = set().union(*(_types(each, depth + 1) for each in schema[union]))
    if not types and ("properties" in schema or "items" in schema):
        types = {"object" if "properties" in schema else "array"}
    return types


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")
