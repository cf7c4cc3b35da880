"""Harmony, the format of gpt-oss: messages on channels, each `<|channel|>NAME to=RECIPIENT<|message|>...<|end|>`.

The analysis channel is reasoning, a message to `functions.NAME` is a call, and every other message is text. Invariant:
as in the other formats, all text except the marks is emitted once.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from slime.models.parsers.events import IllFormed, Reasoning, Text
from slime.models.parsers.json_stream import read_json_object
from slime.models.parsers.output import Channel, MarkFinder, SteppedParser, emit_until
from slime.models.parsers.scanner import NotACall, Steps, UnreadableCall

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKS = MarkFinder([_START, _CHANNEL, *_ENDS])
_TO = r"(?:\s*to=(?P<{}>[\w.:/-]+))?\s*"
_HEADER = re.compile(
    rf"(?:<\|start\|>assistant)?{_TO.format('early')}(?:<\|channel\|>(?P<channel>\w+){_TO.format('late')})?"
    r"(?:<\|constrain\|>)?\s*(?:json)?\s*",
    re.ASCII,
)
_HEADER_TEXT = re.compile(r"[^<]*")
_LONGEST_HEADER = 400


def harmony_opening(name: str | None) -> str:
    """The text that begins a call of the tool with this name, or of any tool if `name` is None."""
    return f"{_CHANNEL}commentary to=functions." + (f"{name} <|constrain|>json{_MESSAGE}" if name is not None else "")


class HarmonyParser(SteppedParser):
    """The parser of gpt-oss; without `reads_calls` calls stay in the text."""

    def __init__(self, *, reads_calls: bool, ids: Callable[[], str]) -> None:
        super().__init__(ids)
        self._reads_calls = reads_calls
        self._text = Channel(self._events, Text, after_mark=False)
        self._reasoning = Channel(self._events, Reasoning, after_mark=True)
        self._begin()

    def _run(self) -> Steps[None]:
        """Parse the answer; the prompt ends after `<|start|>assistant`, so the answer may begin with a recipient."""
        self._reader.begin()
        yield from self._reader.next()
        mark: str | None = ""
        if not (yield from self._reader.take("to=")):
            self._text.say(self._reader.since_begin())
            self._reader.forget()
            mark = yield from emit_until(_MARKS, self._reader, self._text)
        while mark is not None:
            if mark in _ENDS:  # ends nothing: there was no message
                self._text.say(mark)
                mark = yield from emit_until(_MARKS, self._reader, self._text)
            else:
                mark = yield from self._message(mark)
        self._text.end()

    def _message(self, mark: str) -> Steps[str | None]:
        """Read a message whose header begins with `mark`; returns the mark that follows it."""
        if mark:
            self._reader.begin(mark)
        try:
            channel, recipient = yield from self._header()
            if recipient:
                yield from self._call(recipient)
        except UnreadableCall as why:
            if not isinstance(why, NotACall):
                self._events.append(IllFormed(str(why), self._calls.take_back()))
            self._text.say(self._reader.since_begin())
            is_call = True  # or an attempt at one
        else:
            is_call = bool(recipient)
        self._reader.forget()
        if is_call:
            return (yield from emit_until(_MARKS, self._reader, self._text))
        body = self._reasoning if channel == "analysis" else self._text
        body.next_message()
        end = yield from emit_until(_MARKS, self._reader, body)
        if body is self._reasoning:
            body.end()
            body.emit_empty()
            self._text.cut()
        if end in _ENDS:
            return (yield from emit_until(_MARKS, self._reader, self._text))
        return end

    def _header(self) -> Steps[tuple[str | None, str | None]]:
        """Read the rest of a header; returns its channel and its recipient."""
        room = _LONGEST_HEADER
        while True:
            room -= len((yield from self._reader.run(_HEADER_TEXT, room)))
            if (yield from self._reader.take(_MESSAGE)):
                break
            if not (yield from self._reader.take(_CHANNEL)) and not (yield from self._reader.take("<|constrain|>")):
                raise UnreadableCall("the header of a message cannot be read")
        found = _HEADER.fullmatch(self._reader.since_begin().removesuffix(_MESSAGE))
        if found is None:
            raise UnreadableCall("the header of a message cannot be read")
        return found["channel"], found["early"] or found["late"]

    def _call(self, recipient: str) -> Steps[None]:
        if not self._reads_calls:
            raise NotACall("calls stay in the text")
        self._calls.begin(recipient.removeprefix("functions."))
        yield from read_json_object(self._reader, self._calls.arguments)
        if (yield from self._reader.next()) == "<":
            for end in _ENDS:
                if (yield from self._reader.take(end)):
                    break
            else:
                raise UnreadableCall("<|call|> is missing")
        elif self._reader.at < len(self._reader.text):
            raise UnreadableCall("<|call|> is missing")
        self._calls.end()
        self._text.cut()
