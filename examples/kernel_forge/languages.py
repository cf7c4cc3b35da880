"""What kernels are written in: C for the host's compiler, or Triton for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    """A whole kernel, with the mistake of a draft."""
    styles: Mapping[str, tuple[str, ...]]
    """Of each kind of problem: first the naive way, last the fast one."""
    words: str
    turn_tokens: int
    """Room for the longest kernel of the pupil, and half as much again."""
    timed: Mapping[str, tuple[int, int, int]]
    bench: Callable[[str, int], Bench]
    """Of a kind of sandbox and the number of a GPU."""

    def text(self, problem: Problem, draft: Draft) -> str:
        """What the pupil writes: the same, perhaps without a line of the body."""
        lines = self.write(problem, draft).split("\n")
        if draft.forgets is not None:
            del lines[_body(lines)[draft.forgets]]
        return "\n".join(lines)

    def drafts(self, problem: Problem) -> Iterator[Draft]:
        """All that the pupil may decide about a problem."""
        for style in self.styles[problem.kind]:
            for mistake in (None, *MISTAKES):
                yield Draft(style, mistake)
            yield from self.slips(problem, style)

    def slips(self, problem: Problem, style: str) -> list[Draft]:
        """A line forgotten, each once."""
        lines = self.write(problem, Draft(style, None)).split("\n")
        return [Draft(style, None, line) for line in range(len(_body(lines)))]

    def naive(self, problem: Problem) -> str:
        """The kernel that speed is measured against."""
        return self.write(problem, Draft(self.styles[problem.kind][0], None))


def _body(lines: list[str]) -> range:
    """Where the lines behind the kernel's head are."""
    [head] = [at for at, line in enumerate(lines) if "kernel(" in line]
    return range(head + 1, len(lines))


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
