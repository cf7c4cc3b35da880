"""Incremental parser of an answer: reasoning between its marks, text, and the calls of one format.

Invariant: for any split into pieces, every character is emitted once, as reasoning, as text or in a call, unless it is
a mark of the format or white space next to one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from slime.models.parsers.calls import Calls, ToolFormat
from slime.models.parsers.events import Event, IllFormed, Reasoning, Text
from slime.models.parsers.scanner import NotACall, Steps, TextReader, UnreadableCall


@dataclass(frozen=True)
class ReasoningMarks:
    """A family's marks around reasoning. `always`: an answer begins with reasoning, even without the first mark.

    A call inside reasoning ends the reasoning, unless `keeps_calls`.
    """

    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False
    keeps_calls: bool = False

    @property
    def marks(self) -> tuple[str, str]:
        return self.begin, self.end


REASONING_FORMATS = {
    "deepseek-r1": ReasoningMarks(always=True, keeps_calls=True),
    "deepseek-v3": ReasoningMarks(),
    "glm45": ReasoningMarks(),
    "kimi": ReasoningMarks("◁think▷", "◁/think▷"),
    "kimi_k2": ReasoningMarks(),
    "mimo": ReasoningMarks(),
    "minimax": ReasoningMarks(always=True),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "nemotron_3": ReasoningMarks(),
    "qwen3": ReasoningMarks(),
    "qwen3-thinking": ReasoningMarks(always=True),
    "interns1": ReasoningMarks(),
    "step3": ReasoningMarks(always=True, keeps_calls=True),
    "step3p5": ReasoningMarks(always=True, keeps_calls=True),
}
"""The marks of reasoning, by SGLang's names (`--reasoning-parser`)."""


END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<｜end▁of▁sentence｜>",
         "<|user|>", "<|observation|>", "<end_of_turn>")  # fmt: skip
"""Tokens that end an answer: at its very end they are marks."""
_SPACE = re.compile(r"\s*")


class Channel:
    """Emits text or reasoning as events; trailing white space and ambiguous marks are held back until more follows."""

    def __init__(
        self, events: list[Event], kind: type[Reasoning] | type[Text], *, after_mark: bool, tails: Sequence[str] = ()
    ) -> None:
        self._events, self._kind, self._tails = events, kind, tails
        self._held: list[str] = []
        self._after_mark = after_mark  # leading white space belongs to the mark before it
        self._spoke = False
        self.is_new = True  # nothing was emitted since the last mark

    def say(self, text: str) -> None:
        body = text.rstrip()
        if body:
            told = "".join(self._held) + body
            self._held.clear()
            self._tell(told.lstrip() if self._after_mark and not self._spoke else told)
        self.hold(text[len(body) :])

    def hold(self, text: str) -> None:
        """Hold back text that counts only if more text follows."""
        if text:
            self._held.append(text)

    def cut(self) -> None:
        """Drop the held text, which belongs to a mark or to the end of a call that was just read."""
        self._held.clear()
        self._after_mark = self.is_new = True

    def next_message(self) -> None:
        """Start a separate message."""
        self.cut()
        if self._spoke:
            self.hold("\n")

    def end(self) -> None:
        """End the channel: emits held marks as text, and held white space unless it is next to a mark."""
        end = place = len(self._held)
        while place and (self._held[place - 1].isspace() or self._held[place - 1] in self._tails):
            place -= 1
            end = place if self._held[place] in self._tails else end
        rest = "".join(self._held[:end])
        self._held.clear()
        if rest.strip():
            self._events.append(IllFormed("marks of calls without a call"))
            self._tell(rest)
        elif rest and self._kind is Text and not (self.is_new and self._after_mark):
            self._tell(rest)

    def emit_empty(self) -> None:
        """Emit an empty piece if nothing was emitted."""
        if not self._spoke:
            self._tell("")

    def _tell(self, text: str) -> None:
        self._events.append(self._kind(text))
        self._spoke, self.is_new = True, False


class MarkFinder:
    """Finds marks in text, and beginnings of marks at its end; no mark is a prefix of another."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._first = re.compile("[" + re.escape("".join({mark[0] for mark in marks})) + "]")
        self._beginnings = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
        self._longest = max(map(len, marks)) - 1

    def emit_before(self, reader: TextReader, channel: Channel) -> str | None:
        """Emit the text that is certainly before the next mark; reads and returns the mark if it is complete."""
        text = reader.text
        if not self._first.search(text, reader.at):  # most tokens of an answer
            channel.say(text[reader.at :])
            reader.at = len(text)
            return None
        if found := self._pattern.search(text, reader.at):
            channel.say(text[reader.at : found.start()])
            reader.at = found.end()
            return found.group()
        most = min(self._longest, len(text) - reader.at)
        begun = next((size for size in range(most, 0, -1) if text[len(text) - size :] in self._beginnings), 0)
        certain = len(text) - begun  # after it a mark may have begun
        channel.say(text[reader.at : certain])
        reader.at = certain
        return None


mark_finder = lru_cache(MarkFinder)
"""The finder of a format's marks, made once."""


def emit_until(marks: MarkFinder, reader: TextReader, channel: Channel) -> Steps[str | None]:
    """Emit the text before the next mark and read the mark; returns None at the end of the answer."""
    while (mark := marks.emit_before(reader, channel)) is None:
        if not (yield from reader.more()):
            channel.say(reader.text[reader.at :])
            reader.at = len(reader.text)
            return None
    return mark


class SteppedParser(ABC):
    """Base of parsers that are generators over their reader: `_run` yields when it needs more text.

    A subclass calls `_begin` at the end of its constructor, once everything that `_run` uses is set.
    """

    def __init__(self, ids: Callable[[], str]) -> None:
        self._events: list[Event] = []
        self._reader = TextReader()
        self._calls = Calls(self._reader, self._events, ids)

    @abstractmethod
    def _run(self) -> Steps[None]: ...

    def _begin(self) -> None:
        self._steps = self._run()
        self._resume()

    def feed(self, text: str) -> list[Event]:
        self._reader.feed(text)
        return self._resume()

    def end(self) -> list[Event]:
        self._reader.ended = True
        return self._resume()

    def _resume(self) -> list[Event]:
        next(self._steps, None)
        told = self._events.copy()
        self._events.clear()
        return told


class AnswerParser(SteppedParser):
    """The parser of every format that has marks in its text."""

    def __init__(
        self, tool: ToolFormat, think: ReasoningMarks | None, *, thinking: bool, ids: Callable[[], str]
    ) -> None:
        super().__init__(ids)
        self._tool, self._think = tool, think
        self._tails = (*END_TOKENS, *tool.tails)
        self._text = Channel(self._events, Text, after_mark=thinking, tails=self._tails)
        self._reasoning = Channel(self._events, Reasoning, after_mark=True, tails=self._tails)
        self._thinking = thinking
        think_marks = think.marks if think else ()
        self._marks = mark_finder((*tool.begins, *tool.opens, *tool.closes, *self._tails, *think_marks))
        self._begin()

    @property
    def _channel(self) -> Channel:
        return self._reasoning if self._thinking else self._text

    def _run(self) -> Steps[None]:
        while (mark := (yield from self._next_mark())) is not None:
            keeps_calls = self._thinking and self._think is not None and self._think.keeps_calls
            if mark == "" or (mark in self._tool.begins and not keeps_calls):
                yield from self._call(mark)
            else:
                self._mark(mark)
        if self._thinking:
            self._end_reasoning()
        self._text.end()

    def _next_mark(self) -> Steps[str | None]:
        """Emit the text before the next mark; returns None at the end, "" before a call without a mark."""
        reader = self._reader
        while True:
            if self._tool.bare and self._text.is_new and not self._thinking:
                self._text.hold((yield from reader.run(_SPACE)))
                if reader.text[reader.at : reader.at + 1] in self._tool.bare and reader.at < len(reader.text):
                    return ""
            mark = self._marks.emit_before(reader, self._channel)
            if mark is not None:
                return mark
            if not (yield from reader.more()):
                self._channel.say(reader.text[reader.at :])
                return None

    def _call(self, mark: str) -> Steps[None]:
        """Read a call; one that cannot be parsed becomes text."""
        ended = self._calls.ended
        self._reader.begin(mark)
        try:
            yield from self._tool.read(mark, self._reader, self._calls)
        except UnreadableCall as why:
            if self._calls.ended > ended:
                self._after_call()
            index = self._calls.take_back()
            if index is not None or not isinstance(why, NotACall):
                self._events.append(IllFormed(str(why), index))
            self._channel.say(self._reader.since_begin())
        else:
            self._after_call()
            self._text.say(self._reader.since_begin())
        self._reader.forget()

    def _after_call(self) -> None:
        if self._thinking:
            self._end_reasoning()
        self._text.cut()

    def _end_reasoning(self) -> None:
        self._reasoning.end()
        self._reasoning.emit_empty()
        self._thinking = False
        self._text.cut()

    def _mark(self, mark: str) -> None:
        """Handle a mark that begins no call."""
        think = self._think
        if think is not None and mark == think.end and self._thinking:
            self._end_reasoning()
        elif think is not None and mark == think.begin and self._channel.is_new:
            self._channel.cut()
            self._thinking = True
        elif mark in self._tool.closes and self._calls.ended and self._text.is_new and not self._thinking:
            self._text.cut()
        elif mark in self._tool.opens or mark in self._tails:
            self._channel.hold(mark)
        else:
            self._channel.say(mark)
