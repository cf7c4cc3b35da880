"""The task: running sums modulo ten. `1423:7` wants `8247`: 7 + 1 = 8, 8 + 4 = 12, of which 2 is kept, and so on.

The teacher copies right sums. The student copies a pupil who leaves out more than half of the summands. What it is
distilled on are questions alone: nothing in that file says what is right; only held-out questions have labels.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from tiny_chat import write_rows  # noqa: E402

SUMMANDS = 4
LARGEST = 4
LEAVES_OUT = 0.55
"""How often the pupil repeats the last sum instead of adding. Above one half: its likeliest answer is wrong."""


class Problem(NamedTuple):
    """A number, and what is added to it one after the other."""

    start: int
    summands: tuple[int, ...]

    @property
    def question(self) -> str:
        return "".join(map(str, self.summands)) + f":{self.start}"

    def answer(self, left_out: tuple[bool, ...] = (False,) * SUMMANDS) -> str:
        """A digit for each summand."""
        now, written = self.start, ""
        for summand, left in zip(self.summands, left_out, strict=True):
            now = now if left else (now + summand) % 10
            written += str(now)
        return written


class Files(NamedTuple):
    """Prompt files; held-out problems are in none of the others."""

    right: Path
    """What the teacher copies."""
    pupil: Path
    """What the student copies."""
    questions: Path
    held_out: Path


def problems(rng: random.Random) -> list[Problem]:
    """All 2,560, in random order."""
    every = [Problem(start, tuple(summands)) for start in range(10) for summands in _digits(SUMMANDS)]
    rng.shuffle(every)
    return every


def _digits(count: int) -> Iterator[list[int]]:
    if not count:
        yield []
        return
    for rest in _digits(count - 1):
        for digit in range(1, LARGEST + 1):
            yield [*rest, digit]


def write_files(folder: Path, *, held_out: int, seed: int) -> Files:
    """Demonstrations of both, questions, and `held_out` problems with their answers."""
    rng = random.Random(seed)
    apart, others = (every := problems(rng))[:held_out], every[held_out:]
    right = [{"prompt": one.question, "label": one.answer()} for one in others]
    pupil = [
        {"prompt": one.question, "label": one.answer(tuple(rng.random() < LEAVES_OUT for _ in one.summands))}
        for _ in range(4)
        for one in others
    ]
    return Files(
        write_rows(folder / "right.jsonl", right * 2),
        write_rows(folder / "pupil.jsonl", pupil),
        write_rows(folder / "questions.jsonl", ({"prompt": one.question} for one in others)),
        write_rows(folder / "held_out.jsonl", ({"prompt": one.question, "label": one.answer()} for one in apart)),
    )


def right_answer(args: Any, sample: Any) -> float:
    """For evaluations only: 1 if all sums are right and nothing follows."""
    return float(sample.response.strip() == sample.label)


def accuracy(model: Path, held_out: Path) -> float:
    """The share of problems that the model in this folder answers right, greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.tensor([tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows])
    length = tokens.shape[1]
    with torch.inference_mode():
        for _ in range(SUMMANDS + 1):
            tokens = torch.cat([tokens, network(tokens).logits[:, -1:].argmax(-1)], dim=1)
    answers = [tokenizer.decode(row[length:]).partition(tokenizer.eos_token) for row in tokens]
    return sum(said == row["label"] and bool(end) for (said, end, _), row in zip(answers, rows, strict=True)) / len(
        rows
    )
