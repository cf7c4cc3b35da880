"""Values of formats that write them without quotes: typed by the tool's own schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime.parsers.json_text import json_kind


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
