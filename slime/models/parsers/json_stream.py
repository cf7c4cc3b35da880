"""Incremental JSON reader: reads text in pieces and emits it as soon as it is known to be valid.

Invariants: emitted text is exactly the text as written; on invalid JSON the reader stops before the wrong value, key or
character. An escape that is still incomplete waits in the reader. The cost is linear in the text, which
excludes the partial parsers of libraries (jiter, pydantic_core): they parse all of the text again for each piece, and
return values without saying where they end.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable

from slime.models.parsers.scanner import Steps, TextReader, UnreadableCall

_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')  # keeps no state to go back
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?|")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DEEPEST = 100
_LONGEST_SCALAR = 300  # characters: readers of JSON refuse numbers of thousands of digits


class JsonScanner:
    """Finds the end of one JSON value: `scan` pieces of its text until `whole` is true or `error` is set."""

    def __init__(self) -> None:
        self.whole = False
        self.error: str | None = None
        self._open: list[str] = []  # closing brackets of the open arrays and objects
        self._expected = "a value"
        self._is_key = False
        self._may_close = False  # right after an opening bracket
        self._scalar = ""

    def scan(self, text: str, at: int) -> int:
        """Continue from `at`; returns the position up to which the text is valid."""
        while not self.whole and self.error is None:
            if self._expected == "a string":
                at = self._matched(_IN_STRING, text, at)
                if text[at : at + 1] == '"':
                    at += 1
                    self._expected = "a colon" if self._is_key else self._value_ended()
                elif _BEGUN_ESCAPE.fullmatch(text, at):
                    return at
                else:
                    wanted = "a valid escape" if text[at] == "\\" else "an escaped control character"
                    self.error = f"invalid JSON: expected {wanted} in a string"
                continue
            if self._expected == "a scalar":
                begun, at = at, self._matched(_WORD, text, at, at + _LONGEST_SCALAR - len(self._scalar))
                self._scalar += text[begun:at]
                if at == len(text):
                    return at
                is_number = self._scalar[0] not in "tfn"
                if not _SCALAR.fullmatch(self._scalar) or (is_number and math.isinf(float(self._scalar))):
                    self.error = "invalid JSON: expected a number, true, false or null"
                else:
                    self._expected = self._value_ended()
                continue
            at = self._matched(_SPACE, text, at)
            if at == len(text):
                return at
            character, expected, closes = text[at], self._expected, self._may_close
            self._may_close = False
            if self._open and character == self._open[-1] and (closes or expected == "a comma"):
                self._open.pop()
                self._expected = self._value_ended()
            elif character == "," and expected == "a comma":
                self._expected = "a key" if self._open[-1] == "}" else "a value"
            elif character == ":" and expected == "a colon":
                self._expected = "a value"
            elif character == '"' and expected in ("a key", "a value"):
                self._is_key, self._expected = expected == "a key", "a string"
            elif character in "{[" and expected == "a value" and len(self._open) < _DEEPEST:
                self._open.append("}" if character == "{" else "]")
                self._expected, self._may_close = "a key" if character == "{" else "a value", True
            elif expected == "a value" and _WORD.fullmatch(character):
                self._expected, self._scalar = "a scalar", ""
                continue
            else:
                or_end = f" or {self._open[-1]}" if expected == "a comma" else ""
                self.error = f"invalid JSON: expected {expected}{or_end}"
                return at
            at += 1
        return at

    def _value_ended(self) -> str:
        self.whole = not self._open
        return "a comma"

    @staticmethod
    def _matched(pattern: re.Pattern[str], text: str, at: int, end: int = sys.maxsize) -> int:
        found = pattern.match(text, at, end)
        assert found is not None
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
