"""Schemas of Python functions, and validation of arguments against a schema.

Invariant: a function that `function_schema` accepted is called only with arguments that match its type hints; other
arguments end the call as `bad_arguments`, with a sentence that names the argument and the reason. Validation covers the
part of JSON Schema that `function_schema` writes; other keys are ignored.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, Union

from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject

Schema = JsonObject

_PLAIN: dict[object, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
    inspect.Parameter.empty: {},
}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def function_schema(function: Callable[..., object], *, name: str, hidden: Sequence[str] = ()) -> Schema:
    """Return the function's schema in OpenAI's form: parameters from the signature, descriptions from the docstring."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(f"tool {name}: its type hints cannot be read: {error}") from error
    about, arguments = read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in hidden:
            continue
        if parameter.kind not in _NAMED:
            raise UserError(
                f"tool {name}: parameter {parameter.name} cannot be given by name; use plain parameters only"
            )
        properties[parameter.name] = _property(name, parameter, hints, arguments.get(parameter.name))
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    schema: Schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def _property(tool: str, parameter: inspect.Parameter, hints: Mapping[str, object], about: str | None) -> Schema:
    hint = hints.get(parameter.name, inspect.Parameter.empty)
    if typing.get_origin(hint) is Annotated:
        hint, *notes = typing.get_args(hint)
        about = next((note for note in notes if isinstance(note, str)), about)
    schema = dict(_of_hint(hint, f"tool {tool}: parameter {parameter.name}"))
    if about:
        schema["description"] = about
    default = parameter.default
    is_plain = isinstance(default, str | int | float | bool) and not isinstance(default, Enum)
    if default is not inspect.Parameter.empty and (default is None or is_plain):
        schema["default"] = default
    return schema


def _of_hint(hint: object, where: str) -> Schema:
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of_hint(part, where) for part in parts]}
    if origin in (list, Sequence, typing.Sequence) and len(parts) == 1:
        return {"type": "array", "items": _of_hint(parts[0], where)}
    if origin in (dict, Mapping) and len(parts) == 2 and parts[0] is str:
        return {"type": "object", "additionalProperties": _of_hint(parts[1], where)}
    if isinstance(hint, type) and issubclass(hint, str) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    raise UserError(
        f"{where} has the type {hint!r}, which has no JSON form; use str, int, float, bool, list[...], "
        "dict[str, ...], Literal[...], a string enum, or a union of these"
    )


_SECTION = re.compile(r"^(args|arguments|parameters|returns|raises|yields|examples?|notes?):\s*$", re.IGNORECASE)
_PARAM = re.compile(r"^\s*:param\s+(?:\w+\s+)?(\w+):\s*(.*)$")
_ENTRY = re.compile(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the descriptions of arguments by name.

    Descriptions are read from `Args:` and from `:param name:`.
    """
    about: list[str] = []
    arguments: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        if match := _PARAM.match(line):
            section, last = "args", match[1]
            arguments[last] = match[2].strip()
        elif match := _SECTION.match(line):
            section, last = match[1].lower(), ""
        elif line.lstrip().startswith(":"):  # `:returns:` and the like
            section, last = "field", ""
        elif not section:
            about.append(line)
        elif section in ("args", "arguments", "parameters"):
            if match := _ENTRY.match(line):
                last = match[1]
                arguments[last] = match[2].strip()
            elif last and line.strip():
                arguments[last] += " " + line.strip()
    return "\n".join(about).strip(), arguments


def find_mismatch(value: object, schema: JsonMapping, where: str = "arguments") -> str | None:
    """Return the reason why a value does not match the schema, in one sentence; None if it matches."""
    if "anyOf" in schema:
        reasons = [find_mismatch(value, choice, where) for choice in schema["anyOf"]]
        if None in reasons:
            return None
        kinds = " or ".join(dict.fromkeys(_kind(choice) for choice in schema["anyOf"]))
        return f"{where} must be {kinds}, not {_shown(value)}"
    if "enum" in schema and not any(
        value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in schema["enum"]
    ):
        return f"{where} must be one of {', '.join(map(repr, schema['enum']))}, not {_shown(value)}"
    kind = schema.get("type")
    if isinstance(kind, str) and not _is_a(value, kind):
        return f"{where} must be {_kind(schema)}, not {_shown(value)}"
    if isinstance(value, dict):
        return _object_mismatch(value, schema, where)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        found = (find_mismatch(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value))
        return next((reason for reason in found if reason), None)
    return None


def _object_mismatch(value: JsonObject, schema: JsonMapping, where: str) -> str | None:
    properties: JsonMapping = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return f"{where} lack {name!r}" if where == "arguments" else f"{where} lacks {name!r}"
    others = schema.get("additionalProperties", True)
    for name, item in value.items():
        inner = name if where == "arguments" else f"{where}.{name}"
        if name in properties:
            reason = find_mismatch(item, properties[name], inner)
        elif others is False:
            known = ", ".join(properties) or "none"
            return f"there is no parameter {name!r}; there are: {known}"
        else:
            reason = find_mismatch(item, others, inner) if isinstance(others, Mapping) else None
        if reason:
            return reason
    return None


def _is_a(value: object, kind: str) -> bool:
    match kind:
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case "null":
            return value is None
    return True


def _kind(schema: JsonMapping) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    kind = schema.get("type", "anything")
    return kind if kind in ("null", "anything") else f"{'an' if kind[0] in 'aio' else 'a'} {kind}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
