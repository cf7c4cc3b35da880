"""`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each: Mistral."""

from __future__ import annotations

import re

from slime.parsers.calls import Calls, ToolFormat, named_object, opened_object, tool_name
from slime.parsers.json_text import json_object
from slime.parsers.reader import Reader, Steps, Unreadable

_ID = re.compile(r"\w*", re.ASCII)


class Mistral(ToolFormat):
    begins = ("[TOOL_CALLS]",)
    tails = ("</s>",)

    def read(self, mark: str, reader: Reader, calls: Calls) -> Steps[None]:
        if (yield from reader.next()) == "[":
            reader.at += 1
            yield from self._array(reader, calls)
            return
        name = yield from tool_name(reader)
        if (yield from reader.take("[CALL_ID]")):
            yield from reader.run(_ID, 64)
        if not (yield from reader.take("[ARGS]")) and (yield from reader.next()) != "{":
            raise Unreadable("[ARGS] is missing")
        calls.begin(name)
        yield from json_object(reader, calls.arguments)
        calls.end()

    def opening(self, name: str | None) -> str:
        return "[TOOL_CALLS] [" + opened_object(name)

    def _array(self, reader: Reader, calls: Calls) -> Steps[None]:
        while True:
            yield from named_object(reader, calls)
            calls.end()
            character = yield from reader.next()
            if character in ("]", ""):
                reader.at += len(character)
                reader.begin()
                return
            if character != ",":
                raise Unreadable("this is no JSON: a comma or ] is missing")
            reader.at += 1
