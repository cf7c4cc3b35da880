"""JSON as it is written: read piece by piece, told as it is known to be valid so far.

Invariant: what is told is the text as written; where it stops being JSON the reader stands before the character that is
wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from slime.models.parsers.scanner import Reader, Steps, Unreadable

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_PART = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DEEPEST = 100
_LONGEST_SCALAR = 300  # characters: readers of JSON refuse numbers of thousands of digits


class JsonScanner:
    """Where one JSON value ends: `scan` pieces of its text until `whole`, or until there is an `error`."""

    def __init__(self) -> None:
        self.whole = False
        self.error: str | None = None
        self._open: list[str] = []  # the brackets that close what is open
        self._state = self._value
        self._is_key = False
        self._may_close = False  # right after an opening bracket
        self._hex = 0
        self._scalar: list[str] = []
        self._scalar_size = 0

    def scan(self, text: str, at: int) -> int:
        """Read on from `at`; where it stopped, which is before a character that is wrong."""
        while at < len(text) and not self.whole and self.error is None:
            at = self._state(text, at)
        return at

    def _character(self, text: str, at: int) -> tuple[str, int]:
        found = _SPACE.match(text, at)
        assert found is not None
        return text[found.end() : found.end() + 1], found.end()

    def _wrong(self, at: int, wanted: str) -> int:
        self.error = f"this is no JSON: {wanted} is missing"
        return at

    def _value(self, text: str, at: int) -> int:
        character, at = self._character(text, at)
        may_close, self._may_close = self._may_close, self._may_close and not character
        if character in ("{", "["):
            if len(self._open) >= _DEEPEST:
                return self._wrong(at, f"an end of {_DEEPEST} levels")
            self._open.append("}" if character == "{" else "]")
            self._state = self._key if character == "{" else self._value
            self._may_close = True
            return at + 1
        if character == '"':
            self._state, self._is_key = self._string, False
            return at + 1
        if character == "]" and may_close and self._open[-1:] == ["]"]:
            return self._close(at)
        if character == "":
            return at
        self._state = self._scalar_part
        return at if _SCALAR_PART.match(character).end() else self._wrong(at, "a value")  # type: ignore[union-attr]

    def _key(self, text: str, at: int) -> int:
        character, at = self._character(text, at)
        may_close, self._may_close = self._may_close, self._may_close and not character
        if character == '"':
            self._state, self._is_key = self._string, True
            return at + 1
        if character == "}" and may_close:
            return self._close(at)
        return at if character == "" else self._wrong(at, "a key")

    def _colon(self, text: str, at: int) -> int:
        character, at = self._character(text, at)
        if character == ":":
            self._state = self._value
            return at + 1
        return at if character == "" else self._wrong(at, "a colon")

    def _after(self, text: str, at: int) -> int:
        character, at = self._character(text, at)
        if character == ",":
            self._state = self._key if self._open[-1] == "}" else self._value
            return at + 1
        if character == self._open[-1]:
            return self._close(at)
        return at if character == "" else self._wrong(at, f"a comma or {self._open[-1]}")

    def _close(self, at: int) -> int:
        self._open.pop()
        self._end_of_value()
        return at + 1

    def _end_of_value(self) -> None:
        self._state = self._after
        self.whole = not self._open

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        assert found is not None
        at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = self._escape
        elif text[at] != '"':
            return self._wrong(at, "an escape of a control character")
        elif self._is_key:
            self._state = self._colon
        else:
            self._end_of_value()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._hex, self._state = 4, self._hex_digit
        elif text[at] in '"\\/bfnrt':
            self._state = self._string
        else:
            return self._wrong(at, "an escape that JSON knows")
        return at + 1

    def _hex_digit(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._wrong(at, "a hexadecimal digit")
        self._hex -= 1
        if self._hex == 0:
            self._state = self._string
        return at + 1

    def _scalar_part(self, text: str, at: int) -> int:
        found = _SCALAR_PART.match(text, at, at + _LONGEST_SCALAR - self._scalar_size)
        assert found is not None
        self._scalar.append(found.group())
        self._scalar_size += len(found.group())
        if found.end() < len(text):
            if not _is_scalar("".join(self._scalar)):
                return self._wrong(found.end(), "a number, true, false or null")
            self._scalar.clear()
            self._scalar_size = 0
            self._end_of_value()
        return found.end()


def _is_scalar(text: str) -> bool:
    """Whether this is a scalar that every reader of JSON has a value for."""
    return _SCALAR.fullmatch(text) is not None and (text[0] in "tfn" or not math.isinf(float(text)))


def json_value(reader: Reader, tell: Callable[[str], None], *, closes: bool = True) -> Steps[None]:
    """Read one value and tell its text; without its last character, a closing bracket, unless it `closes`."""
    scanner = JsonScanner()
    while True:
        start = reader.at
        reader.at = scanner.scan(reader.text, start)
        last = int(scanner.whole and not closes)
        if piece := reader.text[start : reader.at - last]:
            tell(piece)
        if scanner.whole:
            return
        if scanner.error is not None:
            raise Unreadable(scanner.error)
        if not (yield from reader.more()):
            raise Unreadable("the answer ends inside of a call")


def json_object(reader: Reader, tell: Callable[[str], None]) -> Steps[None]:
    """Read an object and tell its text, without the brace that closes it."""
    if (yield from reader.next()) != "{":
        raise Unreadable("the arguments must be a JSON object")
    yield from json_value(reader, tell, closes=False)


def json_string(reader: Reader) -> Steps[str]:
    """Read a string; what it says."""
    if (yield from reader.next()) != '"':
        raise Unreadable("this is no JSON: a string is missing")
    pieces: list[str] = []
    yield from json_value(reader, pieces.append)
    text = json.loads("".join(pieces))
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise Unreadable("half a character is escaped") from cause
    return text


_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_INTEGER = re.compile("-?[0-9]+")


def json_kind(text: str) -> str | None:
    """The type of the JSON value that this text is, by the words of JSON schemas; None where it is none."""
    scanner = JsonScanner()
    if text != text.strip() or scanner.scan(text + " ", 0) < len(text) or not scanner.whole:
        return None
    number = "integer" if _INTEGER.fullmatch(text) else "number"
    return _KINDS.get(text[0], number)


def object_text(text: str) -> str | None:
    """This text if it is one JSON object, without white space around it."""
    text = text.strip()
    return text if json_kind(text) == "object" else None
