"""Upstream names used in its documents and examples exist with their signature, or are absent with a reason."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections import Counter
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tests.migration.signatures import differences
from tests.migration.tables import Name, mistakes, read_behaviours, read_names

ROOT = Path(__file__).parents[2]
NAMES = read_names()
BEHAVIOURS = read_behaviours()
MODULES = sorted({row.module for row in NAMES})


class Missing(Exception):
    """The module or the name does not exist."""


@cache
def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{name} cannot be imported: {error}") from error


def resolve_name(row: Name) -> Any:
    """Return the object that the row names; for an attribute that only instances have, its name."""
    here = module(row.module)
    for part in row.name.split(".") if row.name else ():
        here = owner(here)
        if not hasattr(here, part):
            if inspect.isclass(here) and part in attributes_of(here):
                return part
            raise Missing(f"{row.path} is not there")
        here = getattr(here, part)
    return here


def owner(here: Any) -> Any:
    """Return the object to look attributes up in: for a factory function, its return type."""
    return get_type_hints(here)["return"] if inspect.isfunction(here) else here


def attributes_of(cls: type) -> set[str]:
    """Instance attributes that the class object itself lacks: fields, and attributes that methods set on `self`."""
    names = {field.name for field in fields(cls)} if is_dataclass(cls) else set()
    for one in cls.__mro__[:-1]:
        names.update(inspect.get_annotations(one))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(one)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


def signature_errors(row: Name) -> list[str]:
    """Differences of the local name from upstream's kind and signature."""
    here = resolve_name(row)
    wrong = []
    if row.what == "async" and not inspect.iscoroutinefunction(here):
        wrong.append("is no async function")
    if row.what == "function" and inspect.iscoroutinefunction(here):
        wrong.append("is an async function")
    if row.what == "class" and not inspect.isclass(here):
        wrong.append("is no class")
    if row.call:
        wrong.extend(differences(here, row.call, is_method=is_method(row)))
    return wrong


def is_method(row: Name) -> bool:
    """True if the name is a method that takes `self`."""
    before, _, last = row.name.rpartition(".")
    if not before:
        return False
    cls = owner(resolve_name(Name(row.module, "same", before)))
    return inspect.isclass(cls) and not isinstance(inspect.getattr_static(cls, last), staticmethod | classmethod | type)


@pytest.mark.parametrize("name", MODULES)
def test_names_of_a_module_match_their_verdicts(name: str) -> None:
    """`same` and `better` names can be called with upstream's signature; `absent` names do not exist."""
    wrong = []
    for row in (row for row in NAMES if row.module == name):
        try:
            if row.verdict in ("same", "better"):
                wrong.extend(
                    f"{row.path} {what}: upstream's is {row.call or 'there'}" for what in signature_errors(row)
                )
            else:
                resolve_name(row)
                if row.verdict == "absent":
                    wrong.append(f"{row.path} is there: say in names.toml what it is worth")
        except Missing as error:
            if row.verdict != "absent":
                wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_rows_are_valid_and_unique() -> None:
    wrong = [f"{row}: {mistake}" for row in (*NAMES, *BEHAVIOURS) for mistake in mistakes(row)]
    twice = [name for name, count in Counter(row.path for row in NAMES).items() if count > 1]
    assert not wrong
    assert not twice


@pytest.mark.parametrize("row", BEHAVIOURS, ids=lambda row: row.what[:60])
def test_behaviour_row_names_an_existing_test(row: Any) -> None:
    if row.verdict == "absent":
        assert not row.test
        return
    file, *names = row.test.split("::")
    assert names, f"{row.what}: no test named as tests/file.py::test_name"
    tree: ast.AST = ast.parse((ROOT / file).read_text())
    for name in names:
        inside = [node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name]
        assert inside, f"{file} has no {name}"
        tree = inside[0]


@pytest.mark.parametrize(
    ("ours", "call", "wrong"),
    [
        (lambda a, b=1: None, "f(a, b=1)", []),
        (lambda a, b=1, *, c=None, d=2: None, "f(a, b=1, *, c=None)", []),
        (lambda *args, **kwargs: None, "f(a, b=1, *, c=None)", []),
        (lambda a, b=2: None, "f(a, b=1)", ["has b=2 and not 1"]),
        (lambda a, b: None, "f(a, b=1)", ["needs b, which is 1 when left out"]),
        (lambda a: None, "f(a, b=1)", ["takes no b"]),
        (
            lambda b, a: None,
            "f(a, b)",
            ["takes a in another place than number 1", "takes b in another place than number 2"],
        ),
        (lambda a, *, b=1: None, "f(a, b=1)", ["takes b in another place than number 2"]),
        (lambda a, b, c: None, "f(a, b)", ["asks for c"]),
        (lambda a: None, "f(a, **kwargs)", ["takes no **kwargs"]),
        (lambda a, /: None, "f(a)", ["does not take a by name"]),
    ],
)
def test_signature_differences_are_reported(ours: Any, call: str, wrong: list[str]) -> None:
    assert differences(ours, call) == wrong
