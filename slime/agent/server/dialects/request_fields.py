"""Validates and reads the fields of request bodies, which may be JSON values of any type.

Invariants: an invalid value raises one `Problem` that names its place, and nothing else is raised. No returned text has
half a surrogate pair, which no tokenizer accepts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from slime.agent.messages import Message
from slime.agent.server.dialects.dialect import Kind, Problem
from slime.storage.json_types import JsonMapping, JsonObject

DEPTH = 64  # maximum nesting of a tool's schema, which is walked recursively


def bad_field(where: str, why: str) -> Problem:
    return Problem(Kind.BAD_BODY, f"{where}: {why}", param=where)


def media_problem(where: str, kind: str) -> Problem:
    return bad_field(
        where, f"this model reads text only, and {kind!r} is not text: leave it out, or describe it in words"
    )


def replace_surrogates(text: str) -> str:
    """Replace each half of a surrogate pair in the text by a replacement mark."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def require_object(value: object, where: str) -> JsonMapping:
    if not isinstance(value, dict):
        raise bad_field(where, f"must be an object, not {_json_type(value)}")
    return value


def require_list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise bad_field(where, f"must be a list, not {_json_type(value)}")
    return value


def require_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise bad_field(where, f"must be a string, not {_json_type(value)}")
    return replace_surrogates(value)


def require_name(value: object, where: str) -> str:
    if not require_text(value, where).strip():
        raise bad_field(where, "must not be empty")
    return replace_surrogates(str(value))


def text_field(values: JsonMapping, name: str, where: str) -> str | None:
    value = values.get(name)
    return None if value is None else require_text(value, f"{where}.{name}" if where else name)


def flag_field(body: JsonMapping, name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_field(name, f"must be true or false, not {_json_type(value)}")
    return value


def number_field(body: JsonMapping, name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_field(name, f"must be a number, not {_json_type(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise bad_field(name, "must be a finite number")
    return number


def int_field(body: JsonMapping, name: str, least: int) -> int | None:
    if number_field(body, name) is None:
        return None
    value = body[name]
    if value != int(value) or not least <= value < 2**63:
        raise bad_field(name, f"must be a whole number of at least {least}")
    return int(value)


def texts(value: object, where: str) -> list[str]:
    """A string, or a list of strings."""
    if isinstance(value, str):
        return [replace_surrogates(value)]
    return [require_text(entry, f"{where}[{i}]") for i, entry in enumerate(require_list(value, where))]


def refuse_unknown_fields(body: JsonMapping, used: Collection[str], neutral: Collection[str]) -> None:
    """Refuse unknown fields, unless they are null, false or empty and so have no effect."""
    for name, value in body.items():
        if name not in used and name not in neutral and value not in (None, [], {}, "", False):
            raise bad_field(replace_surrogates(str(name)), "this field is not known here: leave it out of the request")


def part_text(part: object, where: str, kinds: Collection[str]) -> str:
    """The text of one content part; its type must be one of `kinds`."""
    if isinstance(part, str):
        return replace_surrogates(part)
    fields = require_object(part, where)
    kind = require_text(fields.get("type"), f"{where}.type")
    if kind not in kinds:
        raise media_problem(f"{where}.type", kind)
    name = "refusal" if kind == "refusal" else "text"
    return require_text(fields.get(name), f"{where}.{name}")


def content_text(content: object, where: str, kinds: Collection[str], between: str = "\n") -> str:
    """Content as one text: a string, null, or a list of text parts. A single part equals its text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return replace_surrogates(content)
    parts = enumerate(require_list(content, where))
    return between.join(part_text(part, f"{where}[{i}]", kinds) for i, part in parts)


def result_text(content: object, where: str, kinds: Collection[str]) -> str:
    """The result of a tool call as one text. Pictures are replaced by a note: the agent did not choose to get them."""
    if not isinstance(content, list):
        return content_text(content, where, kinds)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            texts.append(f"[{replace_surrogates(kind)} left out: this model reads text only]")
        else:
            texts.append(part_text(part, f"{where}[{i}]", kinds))
    return "\n".join(texts)


def add_message(messages: list[Message], message: Message) -> None:
    """Append a message; consecutive assistant messages become one turn, unless their references differ."""
    last = messages[-1] if messages else None
    if last is None or not last.role == message.role == "assistant":
        messages.append(message)
        return
    if last.reference and message.reference and last.reference != message.reference:
        messages.append(message)
        return
    thoughts = [thought for thought in (last.reasoning, message.reasoning) if thought is not None]
    messages[-1] = replace(
        last,
        content=last.content + message.content,
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=last.tool_calls + message.tool_calls,
        reference=last.reference or message.reference,
    )


def parsed_arguments(arguments: str) -> JsonObject:
    """The parsed arguments of a call; an empty object if they are not a complete JSON object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def as_json_text(value: object, where: str) -> str:
    """The arguments of a call as JSON text: text stays unchanged, a value is encoded."""
    if value is None or value == "":
        return "{}"
    return replace_surrogates(value) if isinstance(value, str) else json.dumps(plain(value, where), ensure_ascii=False)


def plain(value: object, where: str, depth: int = 0) -> object:
    """Copy a JSON value with clean texts; refuses non-finite numbers and more than `DEPTH` levels."""
    if depth > DEPTH:
        raise bad_field(where, f"is nested more than {DEPTH} deep")
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {replace_surrogates(str(name)): plain(entry, where, depth + 1) for name, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry, where, depth + 1) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise bad_field(where, "holds a number that is not finite")
    return value


def function_tool(name: object, description: object, parameters: object, where: str) -> JsonObject:
    """A tool in the form that chat templates read."""
    function: JsonObject = {"name": require_name(name, f"{where}.name")}
    if description is not None:
        function["description"] = require_text(description, f"{where}.description")
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    function["parameters"] = plain(dict(require_object(schema, f"{where}.parameters")), f"{where}.parameters")
    return {"type": "function", "function": function}


def function_names(tools: Collection[JsonMapping]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def named_tool_choice(name: object, tools: Collection[JsonMapping]) -> str:
    """The name in a tool choice; it must be the name of one of `tools`."""
    text = require_name(name, "tool_choice")
    if text not in function_names(tools):
        raise bad_field("tool_choice", f"there is no tool {text!r} in this request")
    return text


def choice_notes(choice: str) -> tuple[str, ...]:
    """Notes about a tool choice that is not applied, because forced tokens would not be sampled tokens."""
    if choice in ("auto", "none"):
        return ()
    return (f"tool_choice {choice!r} is not forced on the model: what is trained on is sampled freely",)


def session_key(headers: Mapping[str, str]) -> str | None:
    """The session key, from any of the headers that may carry it."""
    lower = {name.lower(): value.strip() for name, value in headers.items()}
    scheme, _, token = lower.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return next((lower[name] for name in ("x-api-key", "x-slime-session", "x-session-id") if lower.get(name)), None)


def _json_type(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "nothing")
