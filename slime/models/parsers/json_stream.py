"""Incremental JSON reader: reads text in pieces and emits it as soon as it is known to be valid.

Invariant: emitted text is exactly the text as written; on invalid JSON the reader stops before the wrong character.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from slime.models.parsers.scanner import Steps, TextReader, UnreadableCall

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_PART = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DEEPEST = 100
_LONGEST_SCALAR = 300  # characters: readers of JSON refuse numbers of thousands of digits


class JsonScanner:
    """Finds the end of one JSON value: `scan` pieces of its text until `whole` is true or `error` is set."""

    def __init__(self) -> None:
        self.whole = False
        self.error: str | None = None
        self._open: list[str] = []  # closing brackets of the open arrays and objects
        self._state = self._value
        self._is_key = False
        self._may_close = False  # right after an opening bracket
        self._hex = 0
        self._scalar: list[str] = []
        self._scalar_size = 0

    def scan(self, text: str, at: int) -> int:
        """Continue from `at`; returns the position where it stopped, before the wrong character if there is one."""
        while at < len(text) and not self.whole and self.error is None:
            at = self._state(text, at)
        return at

    def _character(self, text: str, at: int) -> tuple[str, int]:
        found = _SPACE.match(text, at)
        assert found is not None
        return text[found.end() : found.end() + 1], found.end()

    def _wrong(self, at: int, wanted: str) -> int:
        self.error = f"invalid JSON: expected {wanted}"
        return at

    def _value(self, text: str, at: int) -> int:
        character, at = self._character(text, at)
        may_close, self._may_close = self._may_close, self._may_close and not character
        if character in ("{", "["):
            if len(self._open) >= _DEEPEST:
                return self._wrong(at, f"at most {_DEEPEST} levels")
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
            return self._wrong(at, "an escaped control character")
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
            return self._wrong(at, "a valid escape")
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
            scalar = "".join(self._scalar)
            is_word = scalar[:1] in ("t", "f", "n")
            if _SCALAR.fullmatch(scalar) is None or (not is_word and math.isinf(float(scalar))):
                return self._wrong(found.end(), "a number, true, false or null")
            self._scalar.clear()
            self._scalar_size = 0
            self._end_of_value()
        return found.end()


def read_json_value(reader: TextReader, tell: Callable[[str], None], *, closes: bool = True) -> Steps[None]:
    """Read one value and pass its text to `tell`; without its last character, a closing bracket, unless `closes`."""
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
            raise UnreadableCall(scanner.error)
        if not (yield from reader.more()):
            raise UnreadableCall("the answer ends inside a call")


def read_json_object(reader: TextReader, tell: Callable[[str], None]) -> Steps[None]:
    """Read an object and pass its text to `tell`, without the closing brace."""
    if (yield from reader.next()) != "{":
        raise UnreadableCall("the arguments must be a JSON object")
    yield from read_json_value(reader, tell, closes=False)


def read_json_string(reader: TextReader) -> Steps[str]:
    """Read a string; returns its value."""
    if (yield from reader.next()) != '"':
        raise UnreadableCall("invalid JSON: expected a string")
    pieces: list[str] = []
    yield from read_json_value(reader, pieces.append)
    text = json.loads("".join(pieces))
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise UnreadableCall("an escape is an unpaired surrogate") from cause
    return text


_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_INTEGER = re.compile("-?[0-9]+")


def json_kind(text: str) -> str | None:
    """The JSON schema type of the JSON value that this text is; None if it is not a JSON value."""
    scanner = JsonScanner()
    if text != text.strip() or scanner.scan(text + " ", 0) < len(text) or not scanner.whole:
        return None
    number = "integer" if _INTEGER.fullmatch(text) else "number"
    return _KINDS.get(text[0], number)


def object_text(text: str) -> str | None:
    """The text, stripped of white space, if it is one JSON object; else None."""
    text = text.strip()
    return text if json_kind(text) == "object" else None
