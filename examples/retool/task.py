"""The task: `237*682+967` with a Python interpreter at hand, and the pupil whose work the model first copies.

A model of half a million parameters cannot multiply three-digit numbers. It can have them multiplied, have the rest
added to what came out (`_`, which the interpreter keeps from call to call), and copy the result: three turns. The pupil
knows how, but is impatient: most of the time it gives the product for the answer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_chat import Row, asking, calling, result, saying, write_rows

TOOL = "python"
TOOLS = [{"type": "function", "function": {"name": TOOL}}]
WORDS = r"\d{1,2}|[*+_]"
"""Numbers are read in pairs of digits: a product of six digits is three tokens."""
STOPS_EARLY = 0.65
"""How often the pupil, having multiplied, gives the product for the answer."""


class Problem(NamedTuple):
    """a * b + c"""

    a: int
    b: int
    c: int

    @property
    def question(self) -> str:
        return f"{self.a}*{self.b}+{self.c}"

    @property
    def answer(self) -> str:
        return str(self.a * self.b + self.c)


class Files(NamedTuple):
    """The files of the task."""

    demonstrations: Path
    training: Path
    held_out: Path


def problems(rng: random.Random) -> Iterator[Problem]:
    """No two alike."""
    seen: set[Problem] = set()
    while True:
        problem = Problem(*(rng.randrange(100, 1000) for _ in range(3)))
        if problem not in seen:
            seen.add(problem)
            yield problem


def demonstration(problem: Problem, rng: random.Random) -> list[Row]:
    """What the pupil does about a problem."""
    a, b, c = problem
    said: list[Row] = [asking(problem.question)]
    product = str(a * b)
    said += [calling(TOOL, code=f"{a}*{b}"), result(product)]
    if rng.random() < STOPS_EARLY:
        return [*said, saying(product)]
    return [*said, calling(TOOL, code=f"_+{c}"), result(problem.answer), saying(problem.answer)]


def demonstrations(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Conversations to copy, for `--loss-type sft_loss`."""
    rng = random.Random(seed)
    source = problems(rng)
    return [{"messages": demonstration(next(source), rng), "tools": TOOLS} for _ in range(count)]


def write_files(folder: Path, shown: list[dict[str, Any]], *, training: int, held_out: int, seed: int) -> Files:
    """Demonstrations and two sets of problems, of which those held out are in neither of the others."""
    asked = {row["messages"][0]["content"] for row in shown}
    source = (problem for problem in problems(random.Random(seed + 1)) if problem.question not in asked)
    rows = [
        {"prompt": [asking(problem.question)], "label": problem.answer}
        for problem, _ in zip(source, range(training + held_out), strict=False)
    ]
    return Files(
        write_rows(folder / "demonstrations.jsonl", shown),
        write_rows(folder / "train.jsonl", rows[held_out:]),
        write_rows(folder / "held_out.jsonl", rows[:held_out]),
    )


def right_answer(args: Any, sample: Any) -> float:
    """1 if what the model said in the end is the number, and nothing else."""
    return float(sample.metadata.get("answer", "").strip() == sample.label)
