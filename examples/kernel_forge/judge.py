"""Judges kernels: do they compile, are they right, how fast are they. Each distinct one is judged once.

A kernel is right if it is right at every size, on numbers drawn for this test; only then its speed counts, which is the
time of the naive kernel over its own. Both run in turns, the best of several turns counts, and what came out is
compared too: numbers are new in every turn, so nothing can be answered from memory.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench import GUARD, Bench, DoesNotCompile, Ended, Running
from problems import EDGES, TIMED, Floats, Problem, draw_inputs, draw_numbers

from slime.agent.verdict_cache import Verdicts

TURNS = 5
"""In which the naive kernel and the one that is judged are timed, one after the other."""
AT_ONCE = max(2, (os.cpu_count() or 2) // 2)
"""Kernels that are compiled and tested side by side; timed is one at a time."""
SLOW = 4.0
"""Times as long as the naive kernel: timed in two turns, since more of them would earn it nothing either."""
FULL_SPEED = 2.0
"""Times the naive speed: the whole reward."""
FOR_RIGHT = 0.4
"""The reward of a kernel that is right and no faster than the naive one."""
HARDEST = 1e-3
"""How far timed outputs may be from the naive kernel's, relative to the largest."""


@dataclass(frozen=True)
class Judgement:
    """What came of a kernel, and what the model is told about it."""

    compiled: bool
    right: bool
    speed: float
    """Times the naive kernel's; 0 for one that is wrong."""
    feedback: str

    @property
    def reward(self) -> float:
        """0 for a wrong kernel; from FOR_RIGHT at the naive speed to 1 at FULL_SPEED and above."""
        if not self.right:
            return 0.0
        return FOR_RIGHT + (1 - FOR_RIGHT) * min(max((self.speed - 1) / (FULL_SPEED - 1), 0.0), 1.0)


class Judge:
    """One for a run; `file` keeps what it found out for the next."""

    def __init__(
        self,
        bench: Bench,
        naive: Callable[[Problem], str],
        file: Path | None = None,
        *,
        sizes: Mapping[str, tuple[int, int, int]] = TIMED,
    ) -> None:
        self._bench, self._naive, self._sizes = bench, naive, sizes
        context = {**bench.about(), "machine": f"{platform.node()} {platform.machine()}", "sizes": repr(sizes)}
        self.verdicts = Verdicts(file, context=context)
        self._places = asyncio.Semaphore(AT_ONCE)
        self._clock = asyncio.Lock()
        self._naives: dict[Problem, Running] = {}
        self._kept = AsyncExitStack()
        self._rng = np.random.default_rng()  # not the run's seed: what is tested with cannot be foretold

    async def of(self, problem: Problem, source: str) -> Judgement:
        """The judgement on a kernel; SandboxError if there is none to be had."""

        async def judged(_: str) -> dict[str, Any]:
            async with self._places:
                return asdict(await self._judged(problem, source))

        return Judgement(**await self.verdicts.of(f"{problem.text}\n{source}", judged))

    async def _judged(self, problem: Problem, source: str) -> Judgement:
        try:
            async with self._bench.started(source) as program:
                wrong = await self._wrong(problem, program)
                speed = 0.0 if wrong else await self._speed(problem, program)
        except DoesNotCompile as error:
            return Judgement(False, False, 0.0, f"does not compile: {error}")
        except Ended as error:
            return Judgement(True, False, 0.0, str(error))
        if wrong or not speed:
            return Judgement(True, False, 0.0, wrong or "wrong when timed")
        return Judgement(True, True, speed, f"right, speed {speed_in_words(speed)}")

    async def _wrong(self, problem: Problem, program: Running) -> str:
        """At which size it is wrong, or nothing."""
        for size in EDGES:
            inputs, numbers = draw_inputs(problem, size, self._rng), draw_numbers(2, self._rng)
            await program.load(problem, inputs)
            for row, (a, b) in zip(await program.run(numbers), numbers, strict=True):
                expected, slack = problem.reference(inputs.x, inputs.w, a, b)
                y, guard = row[:-GUARD], row[-GUARD:]
                if not ((guard == a).all() and (np.abs(y - expected) <= slack).all()):
                    return f"wrong at n={inputs.n} m={inputs.m}"
        return ""

    async def _speed(self, problem: Problem, program: Running) -> float:
        """Times the naive kernel's speed; 0 if it was wrong now."""
        n, m, calls = self._sizes[problem.kind]
        inputs = draw_inputs(problem, (n, m), self._rng)
        async with self._clock:
            naive = await self._started_naive(problem)
            for one in (naive, program):
                await one.load(problem, inputs)
            best = {naive: float("inf"), program: float("inf")}
            for turn in range(TURNS + 1):
                numbers, outputs = draw_numbers(calls, self._rng), []
                for one in (naive, program):
                    output, took = await one.timed(numbers)
                    outputs.append(output)
                    if turn:  # the first is for pages and caches
                        best[one] = min(best[one], took)
                if not _alike(*outputs, numbers):
                    return 0.0
                if turn == 2 and best[program] > SLOW * best[naive]:
                    break
        return best[naive] / best[program]

    async def _started_naive(self, problem: Problem) -> Running:
        if problem not in self._naives:
            self._naives[problem] = await self._kept.enter_async_context(self._bench.started(self._naive(problem)))
        return self._naives[problem]

    async def aclose(self) -> None:
        await self.verdicts.aclose()
        await self._kept.aclose()
        await self._bench.aclose()


def speed_in_words(speed: float) -> str:
    """A whole number of times, for a model that reads few words."""
    return "below 1" if speed < 0.75 else str(min(round(speed), 9))


def _alike(naive: Floats, other: Floats, numbers: Floats) -> bool:
    expected = naive[:, :-GUARD]
    off = np.abs(other[:, :-GUARD] - expected)
    return bool((off <= HARDEST * np.abs(expected).max()).all() and (other[:, -GUARD:] == numbers[:, :1]).all())
