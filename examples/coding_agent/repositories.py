"""Small Python repositories with one bug each, made by rule: the same seed gives the same repository, byte for byte.

python repositories.py --count 200 --seed 1 tasks.jsonl

A family knows a function in several meanings ("sum of a and b", "product of a and b") and how each is written. The
bug is that a function is written in another of its family's meanings, or in one that nobody could mean. The tests call
it with arguments for which all of these differ.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN_TESTS = '''"""Run all functions test_* of the files test_*.py (pytest would do as well)."""
import pathlib
import sys

sys.dont_write_bytecode = True
failed = 0
for path in sorted(pathlib.Path(__file__).parent.glob("test_*.py")):
    tests = {"__name__": path.stem}
    try:
        exec(compile(path.read_text(), str(path), "exec"), tests)
    except Exception as error:
        failed += 1
        print(f"FAILED {path.name}: {type(error).__name__}: {error}")
    for name, test in list(tests.items()):
        if name.startswith("test_"):
            try:
                test()
            except Exception as error:
                failed += 1
                print(f"FAILED {path.name}::{name}: {type(error).__name__}: {error}")
print(f"{failed} failed" if failed else "all passed")
sys.exit(1 if failed else 0)
'''
TEST_COMMAND = "{python} -B run_tests.py"
NAMES = (
    "apply", "blend", "calc", "combine", "compute", "derive", "evaluate", "figure", "find", "fold", "form", "gather",
    "get", "handle", "join", "make", "merge", "obtain", "pick", "reduce", "resolve", "select", "solve", "take", "work",
)  # fmt: skip
MODULES = ("core", "lib", "tools", "util", "helpers", "ops")


@dataclass(frozen=True)
class Family:
    """`body` with `{}` for what differs between meanings; `meanings` are (description, what to write there)."""

    name: str
    arguments: tuple[tuple[str, ...], ...]
    """Names that the arguments may have."""
    body: tuple[str, ...]
    at: int
    """The line of the body that differs."""
    meanings: tuple[tuple[str, str], ...]
    calls: Callable[[random.Random], list[tuple[Any, ...]]]
    """Arguments for which the meanings differ."""
    never: tuple[str, ...] = ()
    """Ways to write it that nobody means."""


def _two_numbers(rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.randint(5, 9), rng.randint(2, 4)), (rng.randint(11, 19), rng.randint(3, 7))]


def _list(rng: random.Random) -> list[tuple[list[int]]]:
    values = rng.sample(range(2, 20), 4)
    while not (
        any(v % 2 for v in values) and not all(v % 2 for v in values) and values[0] not in (max(values), min(values))
    ):
        values = rng.sample(range(2, 20), 4)
    return [(values,), ([3, 1, 2, 8, 5],)]


def _mixed_and_even(rng: random.Random) -> list[tuple[list[int]]]:
    return [_list(rng)[0], ([2 * number for number in rng.sample(range(1, 10), 3)],)]


FAMILIES = (
    Family(
        "operator",
        (("a", "b"), ("x", "y"), ("m", "n")),
        ("return {0} {{}} {1}",),
        0,
        (("sum of {0} and {1}", "+"), ("difference of {0} and {1}", "-"), ("product of {0} and {1}", "*")),
        _two_numbers,
        never=("%",),
    ),
    Family(
        "extreme",
        (("xs",), ("items",), ("values",)),
        ("best = {0}[0]", "for x in {0}:", "    if x {{}} best:", "        best = x", "return best"),
        2,
        (("largest of {0}", ">"), ("smallest of {0}", "<")),
        _list,
        never=("==",),
    ),
    Family(
        "bounds",
        (("n",), ("k",), ("m",)),
        ("return sum(range({{}}))",),
        0,
        (("sum of 0 to {0}", "{0} + 1"), ("sum of all below {0}", "{0}")),
        lambda rng: [(rng.randint(3, 9),), (rng.randint(10, 15),)],
        never=("{0} - 1",),
    ),
    Family(
        "index",
        (("xs",), ("items",), ("values",)),
        ("return {0}[{{}}]",),
        0,
        (("first of {0}", "0"), ("second of {0}", "1"), ("last of {0}", "-1")),
        _list,
        never=("2",),
    ),
    Family(
        "filter",
        (("xs",), ("items",), ("values",)),
        ("return [x for x in {0} if x % 2 {{}}]",),
        0,
        (("even ones of {0}", "== 0"), ("odd ones of {0}", "== 1")),
        _list,
        never=("== 2",),
    ),
    Family(
        "quantifier",
        (("xs",), ("items",), ("values",)),
        ("return {{}}(x % 2 == 0 for x in {0})",),
        0,
        (("whether all of {0} are even", "all"), ("whether any of {0} is even", "any")),
        _mixed_and_even,
        never=("not any",),
    ),
    Family(
        "letters",
        (("s",), ("text",), ("word",)),
        ("return {0}.{{}}()",),
        0,
        (("{0} in capitals", "upper"), ("{0} in small letters", "lower")),
        lambda rng: [("aBc" + rng.choice("DEF"),), ("xY",)],
        never=("title",),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Function:
    """One function, rightly or wrongly written."""

    family: Family
    name: str
    arguments: tuple[str, ...]
    meaning: int
    written: str

    @property
    def description(self) -> str:
        return self.family.meanings[self.meaning][0].format(*self.arguments)

    @property
    def right(self) -> str:
        return self.family.meanings[self.meaning][1].format(*self.arguments)

    def choices(self) -> list[str]:
        """All ways to write it that this family has."""
        family = self.family
        return [text.format(*self.arguments) for text in (*(m[1] for m in family.meanings), *family.never)]

    def lines(self, written: str | None = None) -> list[str]:
        written = self.written if written is None else written
        body = [line.format(*self.arguments).replace("{}", written) for line in self.family.body]
        return [
            f"def {self.name}({', '.join(self.arguments)}):",
            f'    """The {self.description}."""',
            *_indented(body),
        ]

    def value(self, call: tuple[Any, ...]) -> Any:
        """What it should give."""
        scope: dict[str, Any] = {}
        exec("\n".join(self.lines(self.right)), scope)
        return scope[self.name](*call)


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@dataclass(frozen=True)
class Repository:
    """A module with functions of which one is wrong, and its tests."""

    seed: int
    module: str
    functions: tuple[Function, ...]
    broken: int
    tests: str = field(repr=False)

    @property
    def bug(self) -> Function:
        return self.functions[self.broken]

    @property
    def path(self) -> str:
        return f"{self.module}.py"

    def source(self, written: str | None = None) -> list[str]:
        """The lines of the module, with the wrong function as it is, or written in this way."""
        lines: list[str] = []
        for number, function in enumerate(self.functions):
            if lines:
                lines.append("")
            lines += function.lines(written if number == self.broken else None)
        return lines

    def bug_line(self, written: str | None = None) -> tuple[int, str]:
        """Number and text of the line that is wrong."""
        before = sum(len(function.lines()) + 1 for function in self.functions[: self.broken])
        number = before + 2 + self.bug.family.at
        return number + 1, self.source(written)[number]

    def row(self) -> dict[str, Any]:
        """The task as a row of a file of tasks (README)."""
        files = {self.path: "\n".join(self.source()) + "\n", "run_tests.py": RUN_TESTS}
        tests = {f"test_{self.module}.py": self.tests, "run_tests.py": RUN_TESTS}
        return {
            "instance_id": f"{self.bug.family.name}-{self.seed}",
            "problem_statement": f"Fix {self.bug.name} in {self.path}: the {self.bug.description}.",
            "files": {**files, **tests},
            "test_files": tests,
            "test_command": TEST_COMMAND,
        }


def make_repository(seed: int, *, functions: int = 2) -> Repository:
    """The repository of a seed, with one to `functions` functions."""
    rng = random.Random(f"repository {seed}")
    families = rng.sample(FAMILIES, rng.randint(1, functions))
    names = rng.sample(NAMES, len(families))
    broken = rng.randrange(len(families))
    made = [
        _function(rng, *pair, is_broken=number == broken)
        for number, pair in enumerate(zip(families, names, strict=True))
    ]
    module = rng.choice(MODULES)
    imports = ", ".join(sorted(names))
    tests = [f"from {module} import {imports}", ""]
    for function in made:
        tests.append(f"def test_{function.name}():")
        tests += [
            f"    assert {function.name}({_arguments(call)}) == {function.value(call)!r}"
            for call in function.family.calls(rng)
        ]
    return Repository(seed, module, tuple(made), broken, "\n".join(tests) + "\n")


def _function(rng: random.Random, family: Family, name: str, *, is_broken: bool) -> Function:
    meaning, arguments = rng.randrange(len(family.meanings)), rng.choice(family.arguments)
    right = Function(family, name, arguments, meaning, "")
    wrong = [choice for choice in right.choices() if choice != right.right]
    return Function(family, name, arguments, meaning, rng.choice(wrong) if is_broken else right.right)


def _arguments(call: tuple[Any, ...]) -> str:
    return ", ".join(repr(argument) for argument in call)


def make_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Tasks of `count` seeds from `seed` on."""
    return (make_repository(number).row() for number in range(seed, seed + count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    args.file.write_text("".join(json.dumps(row) + "\n" for row in make_rows(args.count, args.seed)))


if __name__ == "__main__":
    main()
