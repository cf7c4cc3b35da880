"""`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5 and later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.parsers.calls import Calls, ToolFormat, tool_name
from slime.parsers.reader import Reader, Steps, Unreadable
from slime.parsers.schemas import Schemas


class Glm45(ToolFormat):
    begins = ("<tool_call>",)

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = Schemas(tools)

    def read(self, mark: str, reader: Reader, calls: Calls) -> Steps[None]:
        tool = yield from tool_name(reader)
        character = yield from reader.next()
        if character != "<":
            raise Unreadable("<arg_key> or </tool_call> is missing after the name of the tool")
        calls.begin(tool)
        while not (yield from reader.take("</tool_call>")):
            name = yield from _between(reader, "<arg_key>", "</arg_key>")
            yield from reader.next()
            value = yield from _between(reader, "<arg_value>", "</arg_value>")
            calls.argument(name, self._schemas.value(tool, name, value))
            yield from reader.next()
        calls.end()

    def opening(self, name: str | None) -> str:
        return "<tool_call>" + (f"{name}\n" if name is not None else "")


def _between(reader: Reader, begin: str, end: str) -> Steps[str]:
    if not (yield from reader.take(begin)):
        raise Unreadable(f"{begin} is missing")
    found = yield from reader.upto(end)
    if found is None:
        raise Unreadable(f"{end} is missing")
    return found
