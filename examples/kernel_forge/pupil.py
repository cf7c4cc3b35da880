"""The pupil whose work the model copies first: it knows every way to write a kernel, is careless, and seldom repairs.

What it is told about its kernels is what the sandbox said about them: demonstrations are made with the same judge that
gives the rewards later, and what was found out is kept for then.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from c_programs import Draft
from judge import Judge, Judgement
from languages import MISTAKES, Language
from problems import Problem
from tiny_chat import Row, asking, saying, write_rows

CARELESS = 0.6
"""How often a kernel has a mistake."""
FAST = 0.2
"""How often it is the fast way to go through the matrix."""
REPAIRS = 0.35
"""How often, after a mistake, the next kernel is the same one without it."""
MOST_TURNS = 3

Judgements = dict[tuple[Problem, str], Judgement]


class Files(NamedTuple):
    """The files of the task."""

    demonstrations: Path
    training: Path
    held_out: Path


async def judge_drafts(judge: Judge, language: Language, problems: Sequence[Problem]) -> Judgements:
    """What is to be said about everything that the pupil may write about these problems."""
    asked = [
        (problem, language.write(problem, Draft(style, mistake)))
        for problem in problems
        for style in language.styles[problem.kind]
        for mistake in (None, *MISTAKES)
    ]
    judgements = await asyncio.gather(*(judge.of(problem, source) for problem, source in asked))
    return dict(zip(asked, judgements, strict=True))


def demonstration(problem: Problem, language: Language, known: Judgements, rng: random.Random) -> list[Row]:
    """What the pupil does about a problem: up to three kernels, each but the first after reading about the last.

    A kernel of which nothing was found out is the last one: there is nothing to read.
    """
    said: list[Row] = [asking(language.asked(problem))]
    styles = language.styles[problem.kind]
    draft = _drafted(styles, rng)
    for turn in range(MOST_TURNS):
        source = language.write(problem, draft)
        said.append(saying(source))
        judgement = known.get((problem, source))
        if judgement is None or judgement.reward >= 1 or turn == MOST_TURNS - 1:
            break
        said.append(asking(judgement.feedback))
        repairs = draft.mistake is not None and rng.random() < REPAIRS
        draft = Draft(draft.style, None) if repairs else _drafted(styles, rng)
    return said


def _drafted(styles: Sequence[str], rng: random.Random) -> Draft:
    *others, fast = styles
    style = fast if rng.random() < FAST else rng.choice(others)
    return Draft(style, rng.choice(MISTAKES) if rng.random() < CARELESS else None)


def demonstrations(
    count: int, language: Language, known: Judgements, problems: Sequence[Problem], *, seed: int
) -> list[dict[str, Any]]:
    """Conversations about these problems to copy, for `--loss-type sft_loss`."""
    rng = random.Random(seed)
    return [{"messages": demonstration(rng.choice(problems), language, known, rng)} for _ in range(count)]


def write_files(
    folder: Path,
    language: Language,
    shown: list[dict[str, Any]],
    training: Sequence[Problem],
    held_out: Sequence[Problem],
    *,
    rows: int,
) -> Files:
    """Demonstrations, and `rows` prompts a problem: attempts are alike, but for chance."""

    def prompts(problems: Sequence[Problem]) -> list[dict[str, Any]]:
        made = [{"prompt": [asking(language.asked(problem))], "label": problem.text} for problem in problems]
        return made * rows

    return Files(
        write_rows(folder / "demonstrations.jsonl", shown),
        write_rows(folder / "train.jsonl", prompts(training)),
        write_rows(folder / "held_out.jsonl", prompts(held_out)),
    )
