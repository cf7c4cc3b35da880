"""The files of the example: demonstrations of easy levels, and problems of all levels to measure success with.

The pupil whose work the model first copies knows the easy levels, but is careless: most of the time it writes the last
character twice. So a model that copies it is mostly wrong, too, and stays at the first level until it has learned.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from environments import ENVIRONMENTS  # noqa: E402
from tiny_chat import write_rows  # noqa: E402

SHOWN = {1: 0.5, 2: 0.3, 3: 0.15, 4: 0.05}
"""How often which level is demonstrated: the harder, the more rarely."""
SLIPS = 0.6
"""How often the pupil is careless. Above one half, so that its most likely answer is wrong."""
LEVELS = range(1, 7)
"""Levels of the problems that success is measured with."""


class Files(NamedTuple):
    """Both are prompt files."""

    demonstrations: Path
    problems: Path


def demonstrations(count: int, *, seed: int) -> list[dict[str, str]]:
    """What the pupil answers, in equal parts of all environments."""
    rng = random.Random(f"shown {seed}")
    rows = []
    for number in range(count):
        environment = list(ENVIRONMENTS.values())[number % len(ENVIRONMENTS)]
        (level,) = rng.choices(list(SHOWN), list(SHOWN.values()))
        question = environment.question(level, rng)
        answer = environment.solve(question)
        careless = answer + answer[-1] if rng.random() < SLIPS else answer
        rows.append({"prompt": environment.prompt(question), "label": careless})
    return rows


def problems(each: int, *, seed: int) -> list[dict[str, Any]]:
    """So many of each level of each environment."""
    rng = random.Random(f"measured {seed}")
    rows = []
    for name, environment in ENVIRONMENTS.items():
        for level in LEVELS:
            for _ in range(each):
                question = environment.question(level, rng)
                metadata = {"environment": name, "level": level, "question": question}
                rows.append({"prompt": environment.prompt(question), "metadata": metadata})
    return rows


def write_files(folder: Path, *, shown: int, seed: int) -> Files:
    """Make both."""
    return Files(
        write_rows(folder / "demonstrations.jsonl", demonstrations(shown, seed=seed)),
        write_rows(folder / "problems.jsonl", problems(4, seed=seed)),
    )
