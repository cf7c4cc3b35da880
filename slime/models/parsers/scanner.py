"""Text buffer of incremental parsers that are generators: they yield when they need more text.

Invariant: the progress of a step depends on the text alone, not on the pieces in which it arrives. The unread text is
shorter than a mark whenever a parser waits for more, so the total cost is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
_ANY = 1 << 60
_SPACE = re.compile(r"\s*")


class UnreadableCall(Exception):
    """The text is an attempted call that cannot be parsed; the message says why."""


class NotACall(UnreadableCall):
    """The text only looks like a call and is text."""


class TextReader:
    """The text that has arrived and the position up to which it was read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._read: list[str] | None = None  # the part read since `begin` that is not in `text` any more
        self._from = 0

    def feed(self, text: str) -> None:
        if self._read is not None:
            self._read.append(self.text[self._from : self.at])
        self.text = self.text[self.at :] + text
        self.at = self._from = 0

    def begin(self, mark: str = "") -> None:
        """Start to remember the text that is read, with `mark` before it."""
        self._read = [mark]
        self._from = self.at

    def since_begin(self) -> str:
        return "".join(self._read or ()) + self.text[self._from : self.at]

    def forget(self) -> None:
        """Stop remembering text."""
        self._read = None

    def more(self) -> Steps[bool]:
        """Wait for more text; False at the end."""
        if self.ended:
            return False
        yield
        return True

    def next(self) -> Steps[str]:
        """Skip white space; returns the next character, which stays unread, or "" at the end."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not (yield from self.more()):
                return ""

    def require(self, mark: str) -> Steps[None]:
        """Read `mark`, which must be next."""
        if not (yield from self.take(mark)):
            raise UnreadableCall(f"{mark} is missing")

    def take(self, mark: str) -> Steps[bool]:
        """Read `mark` if it is next; returns whether it was."""
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

    def read_until(self, mark: str) -> Steps[str]:
        """Read up to and including `mark`, which must come; returns the text before it."""
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
                raise UnreadableCall(f"{mark} is missing: the answer ends inside a call")
