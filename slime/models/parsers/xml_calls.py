"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime.models.parsers.calls import Calls, Schemas, ToolFormat, as_string, closed, tool_name
from slime.models.parsers.json_stream import json_kind
from slime.models.parsers.scanner import Reader, Steps, Unreadable

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


# `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5 and later.


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


# `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in a section: MiniMax M2, DeepSeek V3.2.

_INVOKE_NAME = re.compile(r'[^"<>]*')


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
    name = yield from reader.run(_INVOKE_NAME, 256)
    yield from _taken(reader, '"')
    return name


def _taken(reader: Reader, mark: str) -> Steps[None]:
    if not (yield from reader.take(mark)):
        raise Unreadable(f"{mark} is missing")
