"""Reads and checks the migration tables: one row for each flag, name and behaviour of upstream slime.

Invariant: every row has a verdict, and every row that is not `same` has a note with the difference or reason.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
VERDICTS = ("same", "better", "other", "absent")
KINDS = ("function", "async", "class", "value", "module")


@dataclass(frozen=True)
class Name:
    """One name of an upstream module: `call` is its signature there, without `self`."""

    module: str
    verdict: str
    name: str = ""
    """Dotted for class members; empty for the module itself."""
    call: str = ""
    kind: str = ""
    """If empty: a function if there is a `call`, else a value. The `call` of a class is that of its constructor."""
    note: str = ""

    @property
    def what(self) -> str:
        if self.kind:
            return self.kind
        if not self.name:
            return "module"
        return "function" if self.call else "value"

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True)
class Behaviour:
    """One upstream behaviour, and the test that checks it here."""

    what: str
    verdict: str
    test: str = ""
    note: str = ""


@dataclass(frozen=True)
class Flag:
    """One flag of upstream's parser."""

    name: str
    kind: str
    verdict: str
    group: str = ""
    default: Any = None
    example: Any = None
    note: str = ""
    default_here: Any = None


Row = TypeVar("Row", Name, Behaviour, Flag)


def read_names() -> list[Name]:
    return _rows("names.toml", "name", Name)


def read_behaviours() -> list[Behaviour]:
    return _rows("behaviours.toml", "behaviour", Behaviour)


def read_flags() -> list[Flag]:
    """Read the flags; the group of each is the comment above it in the file."""
    rows = _rows("flags.toml", "flag", Flag)
    groups, group = {}, ""
    for line in (HERE / "flags.toml").read_text().splitlines():
        if heading := re.fullmatch(r"\s+# (.+)", line):
            group = heading[1]
        elif row := re.match(r'\s+\{ name = "([^"]+)"', line):
            groups[row[1]] = group
    return [replace(row, group=groups[row.name]) for row in rows]


def mistakes(row: Name | Behaviour | Flag) -> list[str]:
    """Errors of a row itself, independent of the code."""
    wrong = []
    if row.verdict not in VERDICTS:
        wrong.append(f"its verdict is {row.verdict!r}, none of {', '.join(VERDICTS)}")
    if row.verdict != "same" and not row.note:
        wrong.append(f"it is {row.verdict} without a note that says how or why")
    if isinstance(row, Name) and row.what not in KINDS:
        wrong.append(f"its kind is {row.kind!r}, none of {', '.join(KINDS)}")
    return wrong


def _rows(file: str, key: str, row: type[Row]) -> list[Row]:
    path = HERE / file
    table = tomllib.loads(path.read_text())
    if extra := set(table) - {key}:
        raise ValueError(f"{path}: {', '.join(sorted(extra))} is no table of this file; its rows are [[{key}]]")
    known = {field.name for field in fields(row)}
    for entry in table.get(key, []):
        if strange := set(entry) - known:
            raise ValueError(f"{path}: the row {entry} has {', '.join(sorted(strange))}, which no row has")
    return [row(**entry) for entry in table.get(key, [])]
