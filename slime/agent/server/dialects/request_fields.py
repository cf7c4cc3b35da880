"""Reading what a client sent: JSON values of any type, at any place.

Invariant: what is not what it must be becomes one `Problem` that names the place; nothing else is ever raised, and no
text that comes out of here has half a surrogate pair, which no tokenizer takes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from slime.agent.messages import Message
from slime.agent.server.dialects.dialect import Kind, Problem

DEPTH = 64  # of a tool's schema, which is walked recursively


def bad(where: str, why: str) -> Problem:
    return Problem(Kind.BAD_BODY, f"{where}: {why}", param=where)


def no_media(where: str, kind: str) -> Problem:
    return bad(where, f"this model reads text only, and {kind!r} is not text: leave it out, or describe it in words")


def clean(text: str) -> str:
    """The text, with a replacement mark for each half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def a_mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise bad(where, f"must be an object, not {_type_of(value)}")
    return value


def a_list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad(where, f"must be a list, not {_type_of(value)}")
    return value


def a_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise bad(where, f"must be a string, not {_type_of(value)}")
    return clean(value)


def a_name(value: object, where: str) -> str:
    if not a_text(value, where).strip():
        raise bad(where, "must not be empty")
    return clean(str(value))


def text_or_none(values: Mapping[str, Any], name: str, where: str) -> str | None:
    value = values.get(name)
    return None if value is None else a_text(value, f"{where}.{name}" if where else name)


def a_flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad(name, f"must be true or false, not {_type_of(value)}")
    return value


def a_number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(name, f"must be a number, not {_type_of(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise bad(name, "must be a finite number")
    return number


def an_int(body: Mapping[str, Any], name: str, least: int) -> int | None:
    if a_number(body, name) is None:
        return None
    value = body[name]
    if value != int(value) or not least <= value < 2**63:
        raise bad(name, f"must be a whole number of at least {least}")
    return int(value)


def texts(value: object, where: str) -> list[str]:
    """A string, or a list of strings."""
    if isinstance(value, str):
        return [clean(value)]
    return [a_text(entry, f"{where}[{i}]") for i, entry in enumerate(a_list(value, where))]


def known_only(body: Mapping[str, Any], used: Collection[str], neutral: Collection[str]) -> None:
    """Fields that nobody here knows are refused, unless they are null or empty and so ask for nothing."""
    for name, value in body.items():
        if name not in used and name not in neutral and value not in (None, [], {}, "", False):
            raise bad(clean(str(name)), "this field is not known here: leave it out of the request")


def part_text(part: object, where: str, kinds: Collection[str]) -> str:
    """The text of one content part, whose type is one of `kinds`."""
    if isinstance(part, str):
        return clean(part)
    fields = a_mapping(part, where)
    kind = a_text(fields.get("type"), f"{where}.type")
    if kind not in kinds:
        raise no_media(f"{where}.type", kind)
    name = "refusal" if kind == "refusal" else "text"
    return a_text(fields.get(name), f"{where}.{name}")


def content_text(content: object, where: str, kinds: Collection[str], between: str = "\n") -> str:
    """Content as one text: a string, nothing, or a list of text parts. A lone part is the same as its text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    parts = enumerate(a_list(content, where))
    return between.join(part_text(part, f"{where}[{i}]", kinds) for i, part in parts)


def result_text(content: object, where: str, kinds: Collection[str]) -> str:
    """What a tool answered, as one text. Its pictures are named and left out: the agent did not choose to get them."""
    if not isinstance(content, list):
        return content_text(content, where, kinds)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            texts.append(f"[{clean(kind)} left out: this model reads text only]")
        else:
            texts.append(part_text(part, f"{where}[{i}]", kinds))
    return "\n".join(texts)


def add_message(messages: list[Message], message: Message) -> None:
    """Consecutive messages of the assistant are one turn, unless their references tell them apart."""
    last = messages[-1] if messages else None
    if last is None or not last.role == message.role == "assistant" or _other_turn(last, message):
        messages.append(message)
    else:
        thoughts = [thought for thought in (last.reasoning, message.reasoning) if thought is not None]
        messages[-1] = replace(
            last,
            content=last.content + message.content,
            reasoning="".join(thoughts) if thoughts else None,
            tool_calls=last.tool_calls + message.tool_calls,
            reference=last.reference or message.reference,
        )


def _other_turn(first: Message, second: Message) -> bool:
    return bool(first.reference and second.reference and first.reference != second.reference)


def parsed_arguments(arguments: str) -> dict[str, Any]:
    """The arguments as a value; those of a call that was cut off are none."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def as_json_text(value: object, where: str) -> str:
    """Arguments of a call: JSON text stays as it came, a value becomes text."""
    if value is None or value == "":
        return "{}"
    return clean(value) if isinstance(value, str) else json.dumps(plain(value, where), ensure_ascii=False)


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A JSON value with clean texts and finite numbers, as deep as a schema may be."""
    if depth > DEPTH:
        raise bad(where, f"is nested more than {DEPTH} deep")
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(name)): plain(entry, where, depth + 1) for name, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry, where, depth + 1) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise bad(where, "holds a number that is not finite")
    return value


def function_tool(name: object, description: object, parameters: object, where: str) -> dict[str, Any]:
    """A tool in the one form that templates read."""
    function: dict[str, Any] = {"name": a_name(name, f"{where}.name")}
    if description is not None:
        function["description"] = a_text(description, f"{where}.description")
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    function["parameters"] = plain(dict(a_mapping(schema, f"{where}.parameters")), f"{where}.parameters")
    return {"type": "function", "function": function}


def names_of(tools: Collection[Mapping[str, Any]]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def chosen(name: object, tools: Collection[Mapping[str, Any]]) -> str:
    """A tool choice that names a tool."""
    text = a_name(name, "tool_choice")
    if text not in names_of(tools):
        raise bad("tool_choice", f"there is no tool {text!r} in this request")
    return text


def choice_notes(choice: str) -> tuple[str, ...]:
    """What is to be known about a choice that is not the model's: forced tokens are not sampled ones."""
    if choice in ("auto", "none"):
        return ()
    return (f"tool_choice {choice!r} is not forced on the model: what is trained on is sampled freely",)


def session_key(headers: Mapping[str, str]) -> str | None:
    """The key that the client sent, wherever it sent it."""
    lower = {name.lower(): value.strip() for name, value in headers.items()}
    scheme, _, token = lower.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return next((lower[name] for name in ("x-api-key", "x-slime-session", "x-session-id") if lower.get(name)), None)


def _type_of(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "nothing")
