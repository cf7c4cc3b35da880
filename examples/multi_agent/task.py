"""The task: which of five numbers is the largest; and the pupils whose work in three roles the model first copies.

A solver answers, a critic says whether an answer is right, a judge chooses one of several answers that have been
criticised. The pupils know how, and are careless.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_chat import Row, asking, saying, write_rows

SOLVER, CRITIC, JUDGE = "solve", "check", "choose"
"""The roles, and what their system prompts say."""
RIGHT, WRONG = "right", "wrong"
WORDS = r"\d{1,2}|[a-z]+"
NUMBERS, BELOW = 5, 60
SOLVERS = 3
SOLVES, CHECKS, CHOOSES = 0.35, 0.5, 0.3
"""How often a solver looks for the largest number, a critic compares, a judge reads the critics; else they guess."""


class Files(NamedTuple):
    """The files of the task."""

    demonstrations: Path
    training: Path
    held_out: Path


def questions(rng: random.Random) -> Iterator[list[int]]:
    """Numbers, no two alike; no question comes twice."""
    seen: set[tuple[int, ...]] = set()
    while True:
        numbers = rng.sample(range(BELOW), NUMBERS)
        if tuple(numbers) not in seen:
            seen.add(tuple(numbers))
            yield numbers


def to_check(question: str, answer: str) -> str:
    """What a critic is shown."""
    return f"{question} answer {answer}"


def to_choose(question: str, answers: Sequence[str], verdicts: Sequence[str]) -> str:
    """What the judge is shown."""
    return f"{question} answers " + " ".join(f"{a} {v}" for a, v in zip(answers, verdicts, strict=True))


def is_right(answer: str, label: str) -> bool:
    """Whether an answer is the number and nothing else."""
    return answer.strip() == label


def judged_well(verdict: str, answer: str, label: str) -> bool:
    """Whether a critic said of an answer what is true."""
    return verdict.strip() == (RIGHT if is_right(answer, label) else WRONG)


def demonstration(numbers: list[int], rng: random.Random) -> list[Row]:
    """What a pupil does in a role that is drawn for it."""
    question, label = " ".join(map(str, numbers)), str(max(numbers))
    role = rng.choice([SOLVER, CRITIC, JUDGE])
    if role == SOLVER:
        shown, said = question, label if rng.random() < SOLVES else str(rng.choice(numbers))
    elif role == CRITIC:
        answer = label if rng.random() < 0.5 else str(rng.choice(numbers))
        careful = rng.random() < CHECKS
        truth = RIGHT if answer == label else WRONG
        shown, said = to_check(question, answer), truth if careful else rng.choice([RIGHT, WRONG])
    else:
        answers = [label if rng.random() < 0.5 else str(rng.choice(numbers)) for _ in range(SOLVERS)]
        verdicts = [RIGHT if (a == label) == (rng.random() < 0.8) else WRONG for a in answers]
        praised = [a for a, v in zip(answers, verdicts, strict=True) if v == RIGHT]
        wanted = praised if praised and rng.random() < CHOOSES else answers
        shown, said = to_choose(question, answers, verdicts), rng.choice(wanted)
    return [{"role": "system", "content": role}, asking(shown), saying(said)]


def demonstrations(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Conversations to copy, for `--loss-type sft_loss`."""
    rng = random.Random(seed)
    source = questions(rng)
    return [{"messages": demonstration(next(source), rng)} for _ in range(count)]


def write_files(folder: Path, shown: list[dict[str, Any]], *, training: int, held_out: int, seed: int) -> Files:
    """Demonstrations and two sets of questions, of which those held out are in neither of the others."""
    asked = {" ".join(row["messages"][1]["content"].split()[:NUMBERS]) for row in shown}
    source = (numbers for numbers in questions(random.Random(seed + 1)) if " ".join(map(str, numbers)) not in asked)
    rows = [
        {"prompt": [asking(" ".join(map(str, numbers)))], "label": str(max(numbers))}
        for numbers, _ in zip(source, range(training + held_out), strict=False)
    ]
    return Files(
        write_rows(folder / "demonstrations.jsonl", shown),
        write_rows(folder / "train.jsonl", rows[held_out:]),
        write_rows(folder / "held_out.jsonl", rows[:held_out]),
    )
