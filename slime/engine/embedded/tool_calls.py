"""Tool calls in what a model wrote, as OpenAI's answers have them (`--tool-call-parser`, SGLang's option).

Invariant: text and calls together are what the model wrote; a call that cannot be read stays in the text, with all the
others of that answer.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

import orjson

PARSERS = ("hermes", "qwen", "qwen25")
"""SGLang's names for one and the same form: a JSON object between these marks."""
BEGIN, END = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{re.escape(BEGIN)}(.*?){re.escape(END)}", re.DOTALL)


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What is written before the first call, and the calls; the whole text and none where one cannot be read."""
    begin = text.find(BEGIN)
    if begin < 0:
        return text, []
    calls = [_parsed(found) for found in _CALL.findall(text[begin:])]
    if not calls or None in calls:
        return text, []
    return text[:begin].rstrip(), [
        {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "index": place, "function": call}
        for place, call in enumerate(calls)
    ]


def _parsed(text: str) -> dict[str, str] | None:
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return {"name": call["name"], "arguments": orjson.dumps(arguments).decode()}


class HeldBack:
    """The text of a stream as far as no call has begun in it."""

    def __init__(self) -> None:
        self._text = ""
        self._told = 0

    def take(self, new: str) -> str:
        """The text that is new and surely no part of a call."""
        self._text += new
        begin = self._text.find(BEGIN)
        safe = begin if begin >= 0 else len(self._text) - _beginning(self._text)
        told, self._told = self._told, max(self._told, safe)
        return self._text[told : self._told]

    def rest(self) -> tuple[str, list[dict[str, Any]]]:
        """At the end: the text that was not told yet, and the calls."""
        text, calls = split_calls(self._text)
        return text[self._told :], calls


def _beginning(text: str) -> int:
    """How many of the last characters may be the beginning of a call."""
    return next((size for size in range(min(len(BEGIN) - 1, len(text)), 0, -1) if text.endswith(BEGIN[:size])), 0)
