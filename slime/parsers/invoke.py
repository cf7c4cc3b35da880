"""`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in a section: MiniMax M2, DeepSeek V3.2."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime.parsers.calls import Calls, ToolFormat
from slime.parsers.json_text import json_kind
from slime.parsers.reader import Reader, Steps, Unreadable
from slime.parsers.schemas import Schemas, as_string

_NAME = re.compile(r'[^"<>]*')


class Invoke(ToolFormat):
    """MiniMax's tags."""

    section = "minimax:tool_call"
    prefix = ""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = Schemas(tools)
        self._begin = f'<{self.prefix}invoke name="'
        self.begins = (self._begin,)
        self.opens = (f"<{self.section}>",)
        self.closes = (f"</{self.section}>",)

    def read(self, mark: str, reader: Reader, calls: Calls) -> Steps[None]:
        tool = yield from _name(reader)
        yield from _taken(reader, ">")
        calls.begin(tool)
        yield from reader.next()
        while not (yield from reader.take(f"</{self.prefix}invoke>")):
            yield from _taken(reader, f'<{self.prefix}parameter name="')
            name = yield from _name(reader)
            is_text = yield from self._is_text(reader)
            yield from _taken(reader, ">")
            value = yield from reader.upto(f"</{self.prefix}parameter>")
            if value is None:
                raise Unreadable("the answer ends inside of a call")
            calls.argument(name, self._typed(tool, name, value, is_text))
            yield from reader.next()
        calls.end()

    def opening(self, name: str | None) -> str:
        return f"{self.opens[0]}\n{self._begin}" + (f'{name}">\n' if name is not None else "")

    def _is_text(self, reader: Reader) -> Steps[bool | None]:
        """Whether the value is a string, where the model says so."""
        yield from ()
        return None

    def _typed(self, tool: str, name: str, value: str, is_text: bool | None) -> str:
        return self._schemas.value(tool, name, value)


class Dsml(Invoke):
    """DeepSeek's tags, which say of each value whether it is a string or JSON."""

    section = "｜DSML｜function_calls"
    prefix = "｜DSML｜"

    def _is_text(self, reader: Reader) -> Steps[bool | None]:
        if (yield from reader.take(' string="true"')):
            return True
        return False if (yield from reader.take(' string="false"')) else None

    def _typed(self, tool: str, name: str, value: str, is_text: bool | None) -> str:
        if is_text is None:
            return super()._typed(tool, name, value, is_text)
        return as_string(value) if is_text or json_kind(value) is None else value


def _name(reader: Reader) -> Steps[str]:
    name = yield from reader.run(_NAME, 256)
    yield from _taken(reader, '"')
    return name


def _taken(reader: Reader, mark: str) -> Steps[None]:
    if not (yield from reader.take(mark)):
        raise Unreadable(f"{mark} is missing")
