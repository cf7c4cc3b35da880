"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime.parsers.calls import Calls, ToolFormat, closed, tool_name
from slime.parsers.reader import Reader, Steps, Unreadable
from slime.parsers.schemas import Schemas

_NAME = re.compile(r"[^<>]*")
_FUNCTION = "<function="


class Qwen3Coder(ToolFormat):
    """Qwen3-Coder leaves `<tool_call>` out at times."""

    begins = ("<tool_call>", _FUNCTION)

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = Schemas(tools)

    def read(self, mark: str, reader: Reader, calls: Calls) -> Steps[None]:
        if mark != _FUNCTION:
            yield from reader.next()
            if not (yield from reader.take(_FUNCTION)):
                raise Unreadable(f"{_FUNCTION} is missing")
        yield from self._function(reader, calls)
        if mark != _FUNCTION:
            yield from closed(reader, "</tool_call>")
        calls.end()

    def opening(self, name: str | None) -> str:
        return f"<tool_call>\n{_FUNCTION}" + (f"{name}>\n" if name is not None else "")

    def _function(self, reader: Reader, calls: Calls) -> Steps[None]:
        tool = yield from tool_name(reader)
        yield from _closed_tag(reader)
        calls.begin(tool)
        while True:
            yield from reader.next()
            if (yield from reader.take("</function>")):
                return
            if not (yield from reader.take("<parameter=")):
                raise Unreadable("a parameter or </function> is missing")
            name = (yield from reader.run(_NAME, 256)).strip()
            yield from _closed_tag(reader)
            value = yield from reader.upto("</parameter>")
            if value is None:
                raise Unreadable("the answer ends inside of a call")
            calls.argument(name, self._schemas.value(tool, name, value.removeprefix("\n").removesuffix("\n")))


def _closed_tag(reader: Reader) -> Steps[None]:
    if not (yield from reader.take(">")):
        raise Unreadable("> is missing after a name")
