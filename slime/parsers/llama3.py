"""`{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`; several with semicolons: Llama 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.parsers.calls import Calls, ToolFormat, named_object, opened_object
from slime.parsers.reader import NoCall, Reader, Steps, Unreadable
from slime.parsers.schemas import Schemas


class Llama3(ToolFormat):
    """Invariant: an answer that is JSON without the mark is a call only if it names one of the tools."""

    begins = ("<|python_tag|>",)
    bare = "{"

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = Schemas(tools)

    def read(self, mark: str, reader: Reader, calls: Calls) -> Steps[None]:
        yield from self._one(reader, calls, is_marked=bool(mark))
        while (yield from reader.next()) == ";":
            reader.at += 1
            yield from self._one(reader, calls, is_marked=False)

    def opening(self, name: str | None) -> str:
        return opened_object(name, "parameters")

    def _one(self, reader: Reader, calls: Calls, *, is_marked: bool) -> Steps[None]:
        try:
            yield from named_object(reader, calls, self._schemas if not is_marked and self._schemas else None)
        except Unreadable as why:
            if is_marked or calls.open is not None:
                raise
            raise NoCall(str(why)) from why
        calls.end()
