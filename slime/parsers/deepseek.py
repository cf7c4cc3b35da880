"""DeepSeek's calls: a section of calls between special tokens, each with a name and JSON arguments."""

from __future__ import annotations

import re

from slime.parsers.calls import Calls, ToolFormat, closed, tool_name
from slime.parsers.json_text import json_object
from slime.parsers.reader import Reader, Steps, Unreadable

_KIND = re.compile(r"\w*")
_SEP, _END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV31(ToolFormat):
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`: V3.1."""

    begins = ("<｜tool▁call▁begin｜>",)
    opens = ("<｜tool▁calls▁begin｜>",)
    closes = ("<｜tool▁calls▁end｜>",)

    def read(self, mark: str, reader: Reader, calls: Calls) -> Steps[None]:
        name = yield from tool_name(reader)
        yield from reader.next()
        yield from _taken(reader, _SEP)
        calls.begin(name)
        yield from json_object(reader, calls.arguments)
        yield from closed(reader, _END)
        calls.end()

    def opening(self, name: str | None) -> str:
        return self.opens[0] + self.begins[0] + (f"{name}{_SEP}" if name is not None else "")


class DeepSeekV3(DeepSeekV31):
    """The same with `function<｜tool▁sep｜>NAME` and the arguments in a fenced block: V3 and R1."""

    def read(self, mark: str, reader: Reader, calls: Calls) -> Steps[None]:
        if (yield from reader.run(_KIND, 16)) != "function":
            raise Unreadable("the kind of the call is not function")
        yield from _taken(reader, _SEP)
        name = yield from tool_name(reader)
        yield from reader.next()
        yield from _taken(reader, "```json")
        calls.begin(name)
        yield from json_object(reader, calls.arguments)
        yield from reader.next()
        yield from _taken(reader, "```")
        yield from closed(reader, _END)
        calls.end()

    def opening(self, name: str | None) -> str:
        return f"{self.opens[0]}{self.begins[0]}function{_SEP}" + (f"{name}\n```json\n" if name is not None else "")


def _taken(reader: Reader, mark: str) -> Steps[None]:
    if not (yield from reader.take(mark)):
        raise Unreadable(f"{mark} is missing")
