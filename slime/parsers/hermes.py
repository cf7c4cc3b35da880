"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

from slime.parsers.calls import Calls, ToolFormat, closed, named_object, opened_object
from slime.parsers.reader import Reader, Steps


class Hermes(ToolFormat):
    begins = ("<tool_call>",)

    def read(self, mark: str, reader: Reader, calls: Calls) -> Steps[None]:
        yield from named_object(reader, calls)
        yield from closed(reader, "</tool_call>")
        calls.end()

    def opening(self, name: str | None) -> str:
        return "<tool_call>\n" + opened_object(name)
