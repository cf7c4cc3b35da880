"""`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2.

Kimi's own ids count the calls of a conversation; a client gets one that cannot be guessed.
"""

from __future__ import annotations

import re

from slime.parsers.calls import Calls, ToolFormat, closed, tool_name
from slime.parsers.json_text import json_object
from slime.parsers.reader import Reader, Steps, Unreadable

_ID = re.compile(r"(?:functions\.)?(.+):[0-9]+", re.ASCII)
_ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiK2(ToolFormat):
    begins = ("<|tool_call_begin|>",)
    opens = ("<|tool_calls_section_begin|>",)
    closes = ("<|tool_calls_section_end|>",)

    def read(self, mark: str, reader: Reader, calls: Calls) -> Steps[None]:
        found = _ID.fullmatch((yield from tool_name(reader)))
        yield from reader.next()
        if found is None or not (yield from reader.take(_ARGUMENTS)):
            raise Unreadable(f"functions.NAME:0{_ARGUMENTS} is missing")
        calls.begin(found.group(1))
        yield from json_object(reader, calls.arguments)
        yield from closed(reader, "<|tool_call_end|>")
        calls.end()

    def opening(self, name: str | None) -> str:
        return f"{self.opens[0]}{self.begins[0]}functions." + (f"{name}:0{_ARGUMENTS}" if name is not None else "")
