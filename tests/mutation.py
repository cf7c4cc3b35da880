"""`python -m tests.mutation MODULE.py TESTS...`: mutation testing. Prints the mutants that no test detects.

Files on disk stay unchanged. Each mutant is a fork of this process in which importing the module gives the mutated
version. The given tests run in that fork until the first failure. A surviving mutant is printed with its line: either a
test is missing, or the mutant is equivalent to the original.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    line: int
    change: str
    code: CodeType


def mutants(path: Path) -> Iterator[Mutant]:
    """Yields every mutant of a module, each with one small change."""
    tree = ast.parse(path.read_text())
    types = {id(part) for annotation in annotations(tree) for part in ast.walk(annotation)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in types:
            continue
        for change in range(len(list(breakages(node)))):
            broken = copy.deepcopy(tree)
            twin = next(other for index, other in enumerate(ast.walk(broken)) if index == number)
            before = ast.unparse(twin)
            list(breakages(twin))[change]()
            after = ast.unparse(twin)
            ast.fix_missing_locations(broken)
            code = compile(broken, str(path), "exec")
            yield Mutant(getattr(node, "lineno", 0), f"{before[:70]}  ->  {after[:70]}".replace("\n", " "), code)


def annotations(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if (found := getattr(node, name, None)) is not None:
                yield found


def breakages(node: ast.AST) -> Iterator[Any]:
    """Yields the mutations of one node, each as a function that applies it."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield lambda: setattr(node, "ops", [COMPARISONS[type(operator)]()])
        case ast.BinOp(op=op) if type(op) in OPERATORS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield lambda: setattr(node, "op", OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield lambda: setattr(node, "op", ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), test))
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield lambda: setattr(node, "value", ast.Constant(None))
        case ast.Constant(value=bool() as flag):
            yield lambda: setattr(node, "value", not flag)
        case ast.Constant(value=int() | float() as value):
            yield lambda: setattr(node, "value", value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield lambda: setattr(node, "value", ast.Constant(None))


class BrokenModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook: importing `name` runs the code of the mutant."""

    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        self.name, self.path, self.code = name, path, code

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


def survives(mutant: Mutant | None, path: Path, tests: list[str], limit_s: int) -> bool:
    """Runs the tests with the mutant in a fork. True if they pass; a timeout counts as a failure."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(limit_s)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        import pytest

        for name in [name for name in sys.modules if name.partition(".")[0] in ("slime", "tests")]:
            del sys.modules[name]
        if mutant is not None:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            sys.meta_path.insert(0, BrokenModule(name, path, mutant.code))
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", type=lambda text: Path(text).resolve())
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--limit", type=int, default=1000, help="so many mutants at most, chosen at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=60, help="a mutant that takes longer counts as noticed")
    flags = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("aiohttp", "numpy", "pytest", "torch", "transformers.modeling_utils"):
        importlib.import_module(name)
    assert survives(None, flags.module, flags.tests, flags.seconds), "the tests fail without any mutant"
    found = list(mutants(flags.module))
    chosen = sorted(random.Random(flags.seed).sample(range(len(found)), min(flags.limit, len(found))))
    survivors = []
    for index in chosen:
        if survives(found[index], flags.module, flags.tests, flags.seconds):
            survivors.append(found[index])
            print(f"{flags.module.name}:{survivors[-1].line}: {survivors[-1].change}", flush=True)
    print(f"{flags.module.name}: {len(chosen) - len(survivors)} of {len(chosen)} mutants were noticed", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
