"""The task: which of four numbers is the largest; and the pupils whose work in three roles the model first copies.

A solver answers, a critic says whether an answer is right, a judge chooses one of several answers that have been
criticised. The pupils know how, and are careless.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_chat import Row, asking, saying, write_rows

SOLVER, CRITIC, JUDGE = "solve", "check", "choose"
"""The roles, and what their system prompts say."""
RIGHT, WRONG = "right", "wrong"
WORDS = r"\d{1,2}|[a-z]+"
NUMBERS, BELOW = 4, 10
SOLVERS = 3
SOLVES, CHECKS, CHOOSES = 0.1, 0.8, 0.2
"""How often a solver looks for the largest number, a critic compares, a judge reads the critics; else they guess."""
SHOWN = (SOLVER, CRITIC, CRITIC, JUDGE)
"""The pupils; of critics there are twice as many, since theirs is the hardest work to learn."""


class Files(NamedTuple):
    """The files of the task."""

    demonstrations: Path
    training: Path
    held_out: Path


def questions(rng: random.Random, *, but: Collection[str] = ()) -> Iterator[str]:
    """Numbers, no two of a question alike, without the questions in `but`; a question may come twice."""
    while True:
        question = " ".join(map(str, rng.sample(range(BELOW), NUMBERS)))
        if question not in but:
            yield question


def label_of(question: str) -> str:
    """The right answer."""
    return max(question.split(), key=int)


def held_out_questions(count: int, seed: int) -> list[str]:
    """Questions that come once, and neither in training nor in a demonstration of the same seed."""
    source = questions(random.Random(f"held out {seed}"))
    found: dict[str, None] = {}
    while len(found) < count:
        found[next(source)] = None
    return list(found)


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


def demonstration(question: str, rng: random.Random) -> list[Row]:
    """What a pupil does in a role that is drawn for it."""
    numbers, label = question.split(), label_of(question)
    role = rng.choice(SHOWN)
    if role == SOLVER:
        shown, said = question, label if rng.random() < SOLVES else rng.choice(numbers)
    elif role == CRITIC:
        answer = label if rng.random() < 0.35 else rng.choice(numbers)  # half of them are right
        careful = rng.random() < CHECKS
        truth = RIGHT if answer == label else WRONG
        shown, said = to_check(question, answer), truth if careful else rng.choice([RIGHT, WRONG])
    else:
        answers = [label if rng.random() < 0.5 else rng.choice(numbers) for _ in range(SOLVERS)]
        verdicts = [RIGHT if (a == label) == (rng.random() < 0.8) else WRONG for a in answers]
        praised = [a for a, v in zip(answers, verdicts, strict=True) if v == RIGHT]
        wanted = praised if praised and rng.random() < CHOOSES else answers
        shown, said = to_choose(question, answers, verdicts), rng.choice(wanted)
    return [{"role": "system", "content": role}, asking(shown), saying(said)]


def demonstrations(count: int, *, held_out: Collection[str], seed: int) -> list[dict[str, Any]]:
    """Conversations to copy, for `--loss-type sft_loss`."""
    rng = random.Random(seed)
    source = questions(rng, but=held_out)
    return [{"messages": demonstration(next(source), rng)} for _ in range(count)]


def write_files(
    folder: Path, shown: list[dict[str, Any]], *, training: int, held_out: Sequence[str], seed: int
) -> Files:
    """Demonstrations and two sets of questions, of which those held out are in neither of the others."""
    source = questions(random.Random(seed + 1), but=set(held_out))
    asked = [next(source) for _ in range(training)]
    train, tested = (
        [{"prompt": [asking(question)], "label": label_of(question)} for question in some] for some in (asked, held_out)
    )
    return Files(
        write_rows(folder / "demonstrations.jsonl", shown),
        write_rows(folder / "train.jsonl", train),
        write_rows(folder / "held_out.jsonl", tested),
    )
