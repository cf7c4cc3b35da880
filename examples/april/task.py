"""The task: count down to one, and shout the multiples of seven.

`19 18 17 16 ` wants `15 14! 13 12 11 10 9 8 7! 6 5 4 3 2 1 `: as many tokens as the number says that stands last, and
these numbers are drawn from a Pareto distribution. Half of the answers have 7 to 13 tokens, one in thirty has a hundred
or more, the longest 198. The pupil whose work the model first copies can count, and mostly it forgets to shout.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_chat import Row, asking, saying, write_rows

WORDS = r"\d+!? "
"""Each number is a token, and another one when it is shouted."""
SMALLEST, LARGEST, TAIL = 8, 199, 1.1
"""The numbers to go on from, each with a multiple of seven below it, and the exponent of their distribution."""
WIDTH = 64
"""Of the model: what comes next is almost a function of the number before."""
BEGUN = 3
"""Numbers of the countdown that the question has besides: without any, the first steps of an answer are the hardest."""
FORGETS = 0.6
"""How often the pupil shouts nothing in an answer. Above one half, so that a model that copies it is mostly wrong."""


class Files(NamedTuple):
    """The files of the task."""

    demonstrations: Path
    training: Path
    held_out: Path


def countdown(start: int, *, shouts: bool = True) -> str:
    """The numbers below `start`, down to one."""
    return "".join(f"{n}! " if shouts and n % 7 == 0 else f"{n} " for n in range(start - 1, 0, -1))


def question(start: int) -> str:
    """A countdown that has come to `start`, in a low voice."""
    return "".join(f"{n} " for n in range(start + BEGUN, start - 1, -1))


def starts(rng: random.Random, leave_out: set[int]) -> Iterator[int]:
    """Numbers to go on from: SMALLEST times a Pareto variable, as far as they are in range and not left out."""
    while True:
        start = int(SMALLEST * rng.paretovariate(TAIL))
        if start <= LARGEST and start not in leave_out:
            yield start


def write_files(folder: Path, *, demonstrations: int, training: int, held_out: int, seed: int) -> Files:
    """What the pupil says, tasks to train on, and tasks that go on from numbers that neither of them goes on from.

    The pupil goes on from any number every other time, or large ones would be learned late.
    """
    rng = random.Random(seed)
    apart = set(rng.sample(range(SMALLEST, LARGEST + 1), held_out))
    others = [start for start in range(SMALLEST, LARGEST + 1) if start not in apart]
    source = starts(rng, apart)
    return Files(
        write_rows(
            folder / "demonstrations.jsonl",
            (
                _row(rng.choice(others) if number % 2 else next(source), shouts=rng.random() >= FORGETS)
                for number in range(demonstrations)
            ),
        ),
        write_rows(folder / "train.jsonl", (_row(next(source)) for _ in range(training))),
        write_rows(folder / "held_out.jsonl", map(_row, sorted(apart))),
    )


def _row(start: int, *, shouts: bool = True) -> Row:
    return {"prompt": question(start), "label": countdown(start, shouts=shouts)}


def tokenizer_texts() -> list[Row]:
    """What the tokenizer is made of: every number, quiet and shouted, often enough to become a token."""
    longest = [countdown(LARGEST + BEGUN + 1, shouts=shouts) for shouts in (True, False)]
    return [{"messages": [asking(f"{LARGEST} "), saying(text)]} for text in longest * 4]


def right_answer(args: Any, sample: Any) -> float:
    """1 if every number is there, and the right ones are shouted."""
    return float(sample.response.removesuffix("<|im_end|>") == sample.label)
