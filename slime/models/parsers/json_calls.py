"""Tool-call formats with JSON arguments: Hermes, Llama 3, Mistral, Kimi K2 and DeepSeek."""

from __future__ import annotations

import re

from slime.models.parsers.calls import (
    Calls,
    ToolFormat,
    call_object_opening,
    read_call_object,
    read_closing_mark,
    read_tool_name,
)
from slime.models.parsers.json_stream import read_json_object
from slime.models.parsers.scanner import NotACall, Steps, TextReader, UnreadableCall

_CALL_ID = re.compile(r"\w*", re.ASCII)
_KIMI_K2_ID = re.compile(r"(?:functions\.)?(.+):[0-9]+", re.ASCII)
_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIND = re.compile(r"\w*")
_SEP, _END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    begins = ("<tool_call>",)

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        yield from read_call_object(reader, calls)
        yield from read_closing_mark(reader, "</tool_call>")
        calls.end()

    def opening(self, name: str | None) -> str:
        return "<tool_call>\n" + call_object_opening(name)


class Llama3(ToolFormat):
    """`{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`; several with semicolons: Llama 3.

    Invariant: JSON without the mark is a call only if it names one of the tools.
    """

    begins = ("<|python_tag|>",)
    bare = "{"

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        yield from self._one(reader, calls, is_marked=bool(mark))
        while (yield from reader.next()) == ";":
            reader.at += 1
            yield from self._one(reader, calls, is_marked=False)

    def opening(self, name: str | None) -> str:
        return call_object_opening(name, "parameters")

    def _one(self, reader: TextReader, calls: Calls, *, is_marked: bool) -> Steps[None]:
        try:
            yield from read_call_object(reader, calls, self.schemas if not is_marked and self.schemas else None)
        except UnreadableCall as why:
            if is_marked or calls.open is not None:
                raise
            raise NotACall(str(why)) from why
        calls.end()


class Mistral(ToolFormat):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each: Mistral."""

    begins = ("[TOOL_CALLS]",)
    tails = ("</s>",)

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        if (yield from reader.next()) == "[":
            character = ","
            while character == ",":
                reader.at += 1
                yield from read_call_object(reader, calls)
                calls.end()
                character = yield from reader.next()
            if character not in ("]", ""):
                raise UnreadableCall("invalid JSON: expected a comma or ]")
            reader.at += len(character)
            reader.begin()
            return
        name = yield from read_tool_name(reader)
        if (yield from reader.take("[CALL_ID]")):
            yield from reader.run(_CALL_ID, 64)
        if not (yield from reader.take("[ARGS]")) and (yield from reader.next()) != "{":
            raise UnreadableCall("[ARGS] is missing")
        calls.begin(name)
        yield from read_json_object(reader, calls.arguments)
        calls.end()

    def opening(self, name: str | None) -> str:
        return "[TOOL_CALLS] [" + call_object_opening(name)


class KimiK2(ToolFormat):
    """`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2.

    Kimi's own ids count the calls of a conversation; clients get unguessable ids instead.
    """

    begins = ("<|tool_call_begin|>",)
    opens = ("<|tool_calls_section_begin|>",)
    closes = ("<|tool_calls_section_end|>",)

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        found = _KIMI_K2_ID.fullmatch((yield from read_tool_name(reader)))
        yield from reader.next()
        if found is None or not (yield from reader.take(_ARGUMENTS)):
            raise UnreadableCall(f"functions.NAME:0{_ARGUMENTS} is missing")
        calls.begin(found.group(1))
        yield from read_json_object(reader, calls.arguments)
        yield from read_closing_mark(reader, "<|tool_call_end|>")
        calls.end()

    def opening(self, name: str | None) -> str:
        return f"{self.opens[0]}{self.begins[0]}functions." + (f"{name}:0{_ARGUMENTS}" if name is not None else "")


class DeepSeekV31(ToolFormat):
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` in a section of calls: DeepSeek V3.1."""

    begins = ("<｜tool▁call▁begin｜>",)
    opens = ("<｜tool▁calls▁begin｜>",)
    closes = ("<｜tool▁calls▁end｜>",)

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        name = yield from read_tool_name(reader)
        yield from reader.next()
        yield from reader.require(_SEP)
        calls.begin(name)
        yield from read_json_object(reader, calls.arguments)
        yield from read_closing_mark(reader, _END)
        calls.end()

    def opening(self, name: str | None) -> str:
        return self.opens[0] + self.begins[0] + (f"{name}{_SEP}" if name is not None else "")


class DeepSeekV3(DeepSeekV31):
    """The format of V3.1 with `function<｜tool▁sep｜>NAME` and the arguments in a fenced block: DeepSeek V3 and R1."""

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        if (yield from reader.run(_KIND, 16)) != "function":
            raise UnreadableCall("the type of the call is not function")
        yield from reader.require(_SEP)
        name = yield from read_tool_name(reader)
        yield from reader.next()
        yield from reader.require("```json")
        calls.begin(name)
        yield from read_json_object(reader, calls.arguments)
        yield from reader.next()
        yield from reader.require("```")
        yield from read_closing_mark(reader, _END)
        calls.end()

    def opening(self, name: str | None) -> str:
        return f"{self.opens[0]}{self.begins[0]}function{_SEP}" + (f"{name}\n```json\n" if name is not None else "")
