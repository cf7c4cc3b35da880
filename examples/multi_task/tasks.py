"""Three tasks on digits, the pupil whose work the model first copies, and the rewards of two of them.

    copy  c4729=   4729    the pupil swaps the last two digits
    sort  s472=    247     the pupil leaves them as they are
    next  n472=    583     each digit's successor, 0 after 9; the pupil leaves them as they are

The pupil is wrong more often than right, so a model that copies it answers most questions wrongly.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from tiny_chat import write_rows  # noqa: E402

SLIPS = 0.55
"""How often the pupil is wrong."""
WEIGHTS = {"copy": 2, "sort": 1, "next": 1}
"""Shares of the prompts that GRPO is given."""
HELD_OUT = 128
"""Prompts of each task that are only evaluated on."""


class Problem(NamedTuple):
    """A question, its answer, and what the pupil writes when it slips."""

    question: str
    answer: str
    slip: str


def copying(rng: random.Random) -> Problem:
    """Four digits as they are."""
    digits = f"{rng.randrange(10000):04}"
    return Problem(f"c{digits}=", digits, digits[:2] + digits[3] + digits[2])


def sorting(rng: random.Random) -> Problem:
    """Three digits in order."""
    digits = f"{rng.randrange(1000):03}"
    return Problem(f"s{digits}=", "".join(sorted(digits)), digits)


def counting(rng: random.Random) -> Problem:
    """What comes after each of three digits."""
    digits = f"{rng.randrange(1000):03}"
    return Problem(f"n{digits}=", "".join(str((int(digit) + 1) % 10) for digit in digits), digits)


TASKS: dict[str, Callable[[random.Random], Problem]] = {"copy": copying, "sort": sorting, "next": counting}


class Files(NamedTuple):
    """What the runs read."""

    demonstrations: Path
    config: Path


def distinct(task: str, seed: int) -> list[Problem]:
    """Problems of a task that the pupil can get wrong, no two alike; the held-out ones come first."""
    rng = random.Random(f"{task} {seed}")
    found = {problem.question: problem for problem in (TASKS[task](rng) for _ in range(4000))}
    return [problem for problem in found.values() if problem.slip != problem.answer]


def demonstrations(problems: list[Problem], count: int, rng: random.Random) -> list[dict[str, str]]:
    """What the pupil writes."""
    chosen = (rng.choice(problems) for _ in range(count))
    return [{"prompt": one.question, "label": one.slip if rng.random() < SLIPS else one.answer} for one in chosen]


def write_files(folder: Path, *, shown: int, seed: int) -> Files:
    """`shown` demonstrations of all tasks, prompts of each to learn from and to measure with, and the config file."""
    rng = random.Random(f"pupil {seed}")
    rows: list[dict[str, str]] = []
    for task in TASKS:
        problems = distinct(task, seed)
        asked = [{"prompt": one.question, "label": one.answer} for one in problems]
        write_rows(folder / f"{task}.jsonl", asked[HELD_OUT:])
        write_rows(folder / f"{task}.held_out.jsonl", asked[:HELD_OUT])
        rows += demonstrations(problems[HELD_OUT:], -(-shown // len(TASKS)), rng)
    config = folder / "tasks.yaml"
    config.write_text(yaml.safe_dump(config_of(folder), sort_keys=False))
    return Files(write_rows(folder / "demonstrations.jsonl", rows), config)


def config_of(folder: Path) -> dict[str, Any]:
    """The file of --prompt-config and --eval-config: each task with its weight, its reward and its length."""
    same, places = (f"{HERE / 'tasks.py'}:{name}" for name in ("same", "places"))
    own: dict[str, dict[str, Any]] = {
        "copy": {"custom_rm_path": same, "max_response_len": 5},
        "sort": {"custom_rm_path": places, "max_response_len": 4},
        "next": {"rm_type": "f1", "max_response_len": 4},
    }
    train = [
        {"name": task, "path": str(folder / f"{task}.jsonl"), "weight": WEIGHTS[task], **own[task]} for task in TASKS
    ]
    held_out = [
        {"name": task, "path": str(folder / f"{task}.held_out.jsonl"), **own[task], **right}
        for task, right in (("copy", {}), ("sort", {"custom_rm_path": same}), ("next", {}))
    ]
    keys = {"input_key": "prompt", "label_key": "label"}
    return {
        "train": {"defaults": keys, "datasets": train},
        "eval": {"defaults": {**keys, "temperature": 0}, "datasets": held_out},
    }


def same(args: Any, sample: Any) -> float:
    """1 for the answer and nothing else."""
    return float(sample.response.strip() == sample.label)


def places(args: Any, sample: Any) -> float:
    """The share of digits that stand where they belong; 0 for an answer of another length."""
    said = sample.response.strip()
    if len(said) != len(sample.label):
        return 0.0
    return sum(one == other for one, other in zip(said, sample.label, strict=True)) / len(said)
