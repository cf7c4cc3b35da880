"""What kernels are written in: C for the host's compiler, or Triton for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import c_programs
import triton_programs
from bench import Bench, CBench
from c_programs import Draft
from problems import TIMED, TIMED_ON_GPU, Problem
from triton_bench import TritonBench, find_gpu

MISTAKES = c_programs.MISTAKES


class Language(NamedTuple):
    """How the pupil writes kernels, how they are cut into tokens, and where they run."""

    asked: Callable[[Problem], str]
    """What the model is told to write."""
    write: Callable[[Problem, Draft], str]
    styles: Mapping[str, tuple[str, ...]]
    """Of each kind of problem: first the naive way, last the fast one."""
    words: str
    turn_tokens: int
    """Room for the longest kernel of the pupil, and half as much again."""
    timed: Mapping[str, tuple[int, int, int]]
    bench: Callable[[str, int], Bench]
    """Of a kind of sandbox and the number of a GPU."""

    def naive(self, problem: Problem) -> str:
        """The kernel that speed is measured against."""
        return self.write(problem, Draft(self.styles[problem.kind][0], None))


def _on_gpu(sandbox: str, card: int) -> TritonBench:
    return TritonBench(sandbox, find_gpu(card), TIMED_ON_GPU)


LANGUAGES = {
    "c": Language(
        c_programs.asked,
        c_programs.write,
        c_programs.STYLES,
        c_programs.WORDS,
        32,
        TIMED,
        lambda sandbox, card: CBench(sandbox),
    ),
    "triton": Language(
        triton_programs.asked,
        triton_programs.write,
        triton_programs.STYLES,
        triton_programs.WORDS,
        48,
        TIMED_ON_GPU,
        _on_gpu,
    ),
}


def language_for(device: str, asked: str | None) -> str:
    """The one that was asked for; else Triton with a GPU, and C without."""
    return asked or ("triton" if device == "cuda" else "c")
