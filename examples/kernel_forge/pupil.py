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
SLIPS = 0.25
"""How often a mistake is a whole line that was forgotten, so that all sorts of complaints are read."""
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
    asked = [(problem, language.text(problem, draft)) for problem in problems for draft in language.drafts(problem)]
    judgements = await asyncio.gather(*(judge.of(problem, source) for problem, source in asked))
    return dict(zip(asked, judgements, strict=True))


def demonstration(problem: Problem, language: Language, known: Judgements, rng: random.Random) -> list[Row]:
    """What the pupil does about a problem: up to three kernels, each but the first after reading about the last.

    A kernel of which nothing was found out is the last one: there is nothing to read.
    """
    said: list[Row] = [asking(language.asked(problem))]
    draft = _drafted(problem, language, rng)
    for turn in range(MOST_TURNS):
        source = language.text(problem, draft)
        said.append(saying(source))
        judgement = known.get((problem, source))
        if judgement is None or judgement.reward >= 1 or turn == MOST_TURNS - 1:
            break
        said.append(asking(judgement.feedback))
        repairs = not draft.is_right and rng.random() < REPAIRS
        draft = Draft(draft.style, None) if repairs else _drafted(problem, language, rng)
    return said


def _drafted(problem: Problem, language: Language, rng: random.Random) -> Draft:
    *others, fast = language.styles[problem.kind]
    style = fast if rng.random() < FAST else rng.choice(others)
    if rng.random() >= CARELESS:
        return Draft(style, None)
    return rng.choice(language.slips(problem, style)) if rng.random() < SLIPS else Draft(style, rng.choice(MISTAKES))


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
