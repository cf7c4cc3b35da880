"""The problems: a map of every element of a matrix, `f(a * x + b)`, and what is made of the mapped matrix.

A kernel gets a matrix x of n rows and m columns, two numbers a and b, a square matrix w, and writes y. The numbers are
drawn when it is called: nothing of y can be known before. Three kinds of y and a handful of maps make the problems. No
kernel for one that is held out is ever judged before the evaluation: nothing is read about it and nothing earned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]

MAPS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "relu": ("v > 0 ? v : 0", lambda v: np.maximum(v, 0)),
    "square": ("v * v", lambda v: v * v),
    "magnitude": ("v < 0 ? -v : v", np.abs),
    "leak": ("v > 0 ? v : v / 8", lambda v: np.where(v > 0, v, v / 8)),
    "cube": ("v * v * v", lambda v: v * v * v),
    "ramp": ("v > 1 ? 1 : v", lambda v: np.minimum(v, 1)),
}
"""Of a number v: in C, and in numpy for the reference."""

KINDS = ("row sums", "column sums", "product")
EDGES = ((1, 1), (1, 9), (9, 1), (8, 8), (16, 5), (33, 31))
"""Sizes (n, m) that a kernel is tested at: the smallest, thin ones, multiples of usual widths, and neither."""
TIMED = {"row sums": (1024, 1024, 8), "column sums": (1024, 1024, 2), "product": (160, 160, 2)}
"""n, m, and calls in a row: some milliseconds for the naive kernel on a CPU."""
TIMED_ON_GPU = {"row sums": (4096, 4096, 4), "column sums": (4096, 4096, 4), "product": (512, 512, 4)}
"""The same on a GPU: what fills one, and long compared with the half microsecond that its clock tells apart."""


class Problem(NamedTuple):
    """What to compute of which map."""

    kind: str
    map: str

    @property
    def text(self) -> str:
        """The name of the problem."""
        return f"{self.kind} of {self.map}"

    def lengths(self, n: int, m: int) -> tuple[int, int]:
        """Of w and of y."""
        return {"row sums": (0, n), "column sums": (0, m), "product": (m * m, n * m)}[self.kind]

    def reference(self, x: Floats, w: Floats, a: float, b: float) -> tuple[Any, Any]:
        """y in double precision, and how far a sum of rounded numbers may be from it."""
        mapped = MAPS[self.map][1](np.float64(a) * x.astype(np.float64) + np.float64(b))
        return self._combined(mapped, w), 1e-4 * self._combined(np.abs(mapped), np.abs(w)) + 1e-5

    def _combined(self, mapped: Any, w: Floats) -> Any:
        if self.kind == "row sums":
            return mapped.sum(axis=1)
        if self.kind == "column sums":
            return mapped.sum(axis=0)
        return (mapped @ w.reshape(mapped.shape[1], -1).astype(np.float64)).ravel()


def problem_of(text: str) -> Problem:
    """The problem of this name; ValueError if there is none."""
    kind, _, name = text.rpartition(" of ")
    if kind not in KINDS or name not in MAPS:
        raise ValueError(f"{text!r} is no problem: it is one of {', '.join(KINDS)} of {', '.join(MAPS)}")
    return Problem(kind, name)


def split_problems(maps: int) -> tuple[list[Problem], list[Problem]]:
    """Problems of the first so many maps: those that earn rewards, and of each kind one that is held out."""
    names = list(MAPS)[:maps]
    held_out = [Problem(kind, names[index % len(names)]) for index, kind in enumerate(KINDS)]
    every = [Problem(kind, name) for kind in KINDS for name in names]
    return [problem for problem in every if problem not in held_out], held_out


class Inputs(NamedTuple):
    """One call's inputs, drawn anew for every test."""

    n: int
    m: int
    x: Floats
    w: Floats


def draw_inputs(problem: Problem, size: Sequence[int], rng: np.random.Generator) -> Inputs:
    """Numbers of a size at which no map hides a mistake."""
    n, m = size
    draw = rng.standard_normal(n * m + problem.lengths(n, m)[0], dtype=np.float32)
    return Inputs(n, m, draw[: n * m].reshape(n, m), draw[n * m :])


def draw_numbers(count: int, rng: np.random.Generator) -> Floats:
    """So many pairs (a, b)."""
    return rng.uniform(0.5, 1.5, (count, 2)).astype(np.float32)
