"""Tool-call formats with XML-like tags: Qwen3-Coder, GLM-4.5, MiniMax M2 and DeepSeek V3.2."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime.models.parsers.calls import (
    Calls,
    ToolFormat,
    json_string_text,
    read_closing_mark,
    read_tool_name,
)
from slime.models.parsers.json_stream import json_kind
from slime.models.parsers.scanner import Steps, TextReader, UnreadableCall
from slime.storage.json_types import JsonMapping

_NAME = re.compile(r"[^<>]*")
_FUNCTION = "<function="
_INVOKE_NAME = re.compile(r'[^"<>]*')


class Qwen3Coder(ToolFormat):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5.

    Qwen3-Coder sometimes omits `<tool_call>`.
    """

    begins = ("<tool_call>", _FUNCTION)

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        if mark != _FUNCTION:
            yield from reader.next()
            yield from reader.require(_FUNCTION)
        tool = yield from read_tool_name(reader)
        yield from reader.require(">")
        calls.begin(tool)
        while True:
            yield from reader.next()
            if (yield from reader.take("</function>")):
                break
            if not (yield from reader.take("<parameter=")):
                raise UnreadableCall("a parameter or </function> is missing")
            name = (yield from reader.run(_NAME, 256)).strip()
            yield from reader.require(">")
            value = yield from reader.read_until("</parameter>")
            calls.argument(name, self.schemas.value(tool, name, value.removeprefix("\n").removesuffix("\n")))
        if mark != _FUNCTION:
            yield from read_closing_mark(reader, "</tool_call>")
        calls.end()

    def opening(self, name: str | None) -> str:
        return f"<tool_call>\n{_FUNCTION}" + (f"{name}>\n" if name is not None else "")


class Glm45(ToolFormat):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5 and later."""

    begins = ("<tool_call>",)

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        tool = yield from read_tool_name(reader)
        character = yield from reader.next()
        if character != "<":
            raise UnreadableCall("<arg_key> or </tool_call> is missing after the name of the tool")
        calls.begin(tool)
        while not (yield from reader.take("</tool_call>")):
            name = yield from _read_element(reader, "<arg_key>", "</arg_key>")
            yield from reader.next()
            value = yield from _read_element(reader, "<arg_value>", "</arg_value>")
            calls.argument(name, self.schemas.value(tool, name, value))
            yield from reader.next()
        calls.end()

    def opening(self, name: str | None) -> str:
        return "<tool_call>" + (f"{name}\n" if name is not None else "")


def _read_element(reader: TextReader, begin: str, end: str) -> Steps[str]:
    yield from reader.require(begin)
    return (yield from reader.read_until(end))


class Invoke(ToolFormat):
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` in a section, with MiniMax M2's tags."""

    section = "minimax:tool_call"
    prefix = ""

    def __init__(self, tools: Sequence[JsonMapping]) -> None:
        super().__init__(tools)
        self._begin = f'<{self.prefix}invoke name="'
        self.begins = (self._begin,)
        self.opens = (f"<{self.section}>",)
        self.closes = (f"</{self.section}>",)

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        tool = yield from _read_quoted_name(reader)
        yield from reader.require(">")
        calls.begin(tool)
        yield from reader.next()
        while not (yield from reader.take(f"</{self.prefix}invoke>")):
            yield from reader.require(f'<{self.prefix}parameter name="')
            name = yield from _read_quoted_name(reader)
            is_text = yield from self._is_text(reader)
            yield from reader.require(">")
            value = yield from reader.read_until(f"</{self.prefix}parameter>")
            calls.argument(name, self._typed(tool, name, value, is_text))
            yield from reader.next()
        calls.end()

    def opening(self, name: str | None) -> str:
        return f"{self.opens[0]}\n{self._begin}" + (f'{name}">\n' if name is not None else "")

    def _is_text(self, reader: TextReader) -> Steps[bool | None]:
        """True if the model declares the value a string, False if JSON, None if it declares nothing."""
        yield from ()
        return None

    def _typed(self, tool: str, name: str, value: str, is_text: bool | None) -> str:
        return self.schemas.value(tool, name, value)


class Dsml(Invoke):
    """`Invoke` with DeepSeek V3.2's tags, which declare each value a string or JSON."""

    section = "｜DSML｜function_calls"
    prefix = "｜DSML｜"

    def _is_text(self, reader: TextReader) -> Steps[bool | None]:
        if (yield from reader.take(' string="true"')):
            return True
        return False if (yield from reader.take(' string="false"')) else None

    def _typed(self, tool: str, name: str, value: str, is_text: bool | None) -> str:
        if is_text is None:
            return super()._typed(tool, name, value, is_text)
        return json_string_text(value) if is_text or json_kind(value) is None else value


def _read_quoted_name(reader: TextReader) -> Steps[str]:
    name = yield from reader.run(_INVOKE_NAME, 256)
    yield from reader.require('"')
    return name
