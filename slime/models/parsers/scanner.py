"""What was written and not read yet, for parsers that read like a program and stop where the text does.

A parser is a generator: it yields where it needs more text, and goes on where it was. Invariant: how far a step reads
depends on the text alone and not on the pieces it came in; what is unread when more is asked for is shorter than a
mark, so a text costs its length once.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
_ANY = 1 << 60
_SPACE = re.compile(r"\s*")


class Unreadable(Exception):
    """This was meant as a call and is none; says why."""


class NoCall(Unreadable):
    """This only looked like a call, and is text."""


class Reader:
    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._read: list[str] | None = None  # since `begin`, as far as it is no longer in `text`
        self._from = 0

    def feed(self, text: str) -> None:
        if self._read is not None:
            self._read.append(self.text[self._from : self.at])
        self.text = self.text[self.at :] + text
        self.at = self._from = 0

    def begin(self, mark: str = "") -> None:
        """From here on remember what is read, after `mark`."""
        self._read = [mark]
        self._from = self.at

    def since_begin(self) -> str:
        return "".join(self._read or ()) + self.text[self._from : self.at]

    def forget(self) -> None:
        """From here on remember nothing."""
        self._read = None

    def more(self) -> Steps[bool]:
        """Wait for more text; False at the end."""
        if self.ended:
            return False
        yield
        return True

    def next(self) -> Steps[str]:
        """The next character that is no white space, which stays unread; "" at the end."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not (yield from self.more()):
                return ""

    def take(self, mark: str) -> Steps[bool]:
        """Read `mark` if it is next."""
        while True:
            if self.text.startswith(mark, self.at):
                self.at += len(mark)
                return True
            if not mark.startswith(self.text[self.at : self.at + len(mark)]) or not (yield from self.more()):
                return False

    def run(self, characters: re.Pattern[str], most: int = _ANY) -> Steps[str]:
        """Read the characters of a class, such as those of a name, up to `most`."""
        pieces: list[str] = []
        while True:
            found = characters.match(self.text, self.at, self.at + most)
            assert found is not None
            pieces.append(found.group())
            most -= len(found.group())
            self.at = found.end()
            if self.at < len(self.text) or most == 0 or not (yield from self.more()):
                return "".join(pieces)

    def upto(self, mark: str) -> Steps[str | None]:
        """Read all before `mark` and the mark; None where it never comes."""
        pieces: list[str] = []
        while True:
            found = self.text.find(mark, self.at)
            if found >= 0:
                pieces.append(self.text[self.at : found])
                self.at = found + len(mark)
                return "".join(pieces)
            certain = max(self.at, len(self.text) - len(mark) + 1)
            pieces.append(self.text[self.at : certain])
            self.at = certain
            if not (yield from self.more()):
                self.at = len(self.text)
                return None
