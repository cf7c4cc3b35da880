"""Pythonic calls, `[NAME(key=value), ...]`, alone or after `<|python_start|>`: Llama 4 and others.

They are emitted once the list is complete, because the value of a Python literal is known only at its end.
"""

from __future__ import annotations

import ast
import json
import re
import warnings

from slime.models.parsers.calls import Calls, ToolFormat
from slime.models.parsers.scanner import NotACall, Steps, TextReader, UnreadableCall

_NAME = re.compile(r"[\w.]*", re.ASCII)
_PLAIN = re.compile(r"""[^\[\](){}'"#]*""")
_IN_QUOTES = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_WORDS = {"true": True, "false": False, "null": None}
_DEEPEST = 40


class Pythonic(ToolFormat):
    """The parser of pythonic calls.

    Invariant: a list without the mark is a list of calls only if all of its calls name tools.
    """

    begins = ("<|python_start|>",)
    closes = ("<|python_end|>",)
    bare = "["

    def read(self, mark: str, reader: TextReader, calls: Calls) -> Steps[None]:
        try:
            made = _parse_calls((yield from _read_list(reader)))
            if not mark and self.schemas and not all(name in self.schemas for name, _ in made):
                raise UnreadableCall("there is no such tool")
        except UnreadableCall as why:
            raise why if mark else NotACall(str(why)) from why
        for name, arguments in made:
            calls.begin(name)
            for key, value in arguments:
                calls.argument(key, json.dumps(value, ensure_ascii=False))
            calls.end()

    def opening(self, name: str | None) -> str:
        return "[" + (f"{name}(" if name is not None else "")


def _read_list(reader: TextReader) -> Steps[str]:
    """Read a list that begins with a call; returns its text."""
    if (yield from reader.next()) != "[":
        raise UnreadableCall("a list of calls is missing")
    reader.at += 1
    yield from reader.next()
    pieces = ["[", (yield from reader.run(_NAME, 256))]
    depth = 1
    if (yield from reader.next()) != "(":
        raise UnreadableCall("the name of a tool is missing")
    while depth:
        pieces.append((yield from reader.run(_PLAIN)))
        character = reader.text[reader.at : reader.at + 1]
        if character in ("", "#") or depth > _DEEPEST:
            raise UnreadableCall("the list of calls has no end")
        reader.at += 1
        pieces.append(character)
        if character in _IN_QUOTES:
            pieces.append((yield from _read_quoted(reader, character)))
        else:
            depth += 1 if character in "[({" else -1
    return "".join(pieces)


def _read_quoted(reader: TextReader, quote: str) -> Steps[str]:
    pieces: list[str] = []
    while True:
        pieces.append((yield from reader.run(_IN_QUOTES[quote])))
        is_escape = reader.text[reader.at : reader.at + 1] == "\\"
        size = 2 if is_escape else 1
        while len(reader.text) < reader.at + size:
            if not (yield from reader.more()):
                raise UnreadableCall("a string has no end")
        pieces.append(reader.text[reader.at : reader.at + size])
        reader.at += size
        if not is_escape:
            return "".join(pieces)


def _parse_calls(text: str) -> list[tuple[str, list[tuple[str, object]]]]:
    """The names and arguments of a list of calls."""
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings about invalid escapes
            parsed = ast.parse(text, mode="eval").body
        assert isinstance(parsed, ast.List)
        return [_call(each) for each in parsed.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        raise UnreadableCall(f"this is not a list of calls: {cause}") from cause


def _call(node: ast.expr) -> tuple[str, list[tuple[str, object]]]:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("a call must be NAME(key=value)")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("a call must not have ** arguments")
    name = ast.unparse(node.func)
    if _NAME.fullmatch(name) is None:
        raise ValueError("a call must be NAME(key=value)")
    return name, [(str(keyword.arg), _json_literal(keyword.value)) for keyword in node.keywords]


def _json_literal(node: ast.expr | None) -> object:
    """The JSON value of a literal; raises ValueError if it has none."""
    match node:
        case ast.Constant(value=bool() | int() | None):
            return node.value
        case ast.Constant(value=float() as value) if abs(value) != float("inf"):
            return value
        case ast.Constant(value=str() as value):
            value.encode()
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_json_literal(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            made: dict[str, object] = {}
            for key, item in zip(keys, values, strict=True):
                name = _json_literal(key)
                if not isinstance(name, str):
                    raise ValueError("a key is not a string")
                made[name] = _json_literal(item)
            if len(made) == len(keys):
                return made
    raise ValueError("a value is not a literal")
