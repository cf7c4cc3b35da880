"""The task: how fast is a cart after several pushes of 1 m/s^2? `+4-2........v3` is pushed forward for 4 s and back for
2 s, and begins at 3 m/s. The model writes the speed after each push, `>7>5`; the last one is the answer. Dots fill the
places of pushes that there are not, so that a push always stands as far from where its speed is written.

The longer the problem, the longer the answer, and the more often the pupil whose work the model first copies slips: it
forgets that a push lasts longer than a second.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from tiny_chat import write_rows  # noqa: E402

SLIPS = 0.55
"""How often the pupil takes a push for one of a second. Above one half: its most likely answer is wrong."""
MOST_PUSHES = 6
FASTEST = 10


class Problem(NamedTuple):
    """A speed, and the seconds of each push; of one backwards they are negative."""

    speed: int
    pushes: tuple[int, ...]

    @property
    def question(self) -> str:
        pushes = "".join(f"{seconds:+d}" for seconds in self.pushes)
        return f"{pushes:.<{2 * MOST_PUSHES}}v{self.speed}"

    def speeds(self, slips: tuple[bool, ...] = ()) -> list[int]:
        """After each push; where the pupil slips, the push lasts a second."""
        now, found = self.speed, []
        for place, seconds in enumerate(self.pushes):
            now += (1 if seconds > 0 else -1) if slips and slips[place] else seconds
            found.append(now)
        return found


class Files(NamedTuple):
    """Prompt files."""

    demonstrations: Path
    training: Path
    held_out: Path


def problems(rng: random.Random) -> Iterator[Problem]:
    """No two alike; no cart rolls back or becomes too fast."""
    seen: set[Problem] = set()
    while True:
        pushes = tuple(rng.choice((-4, -3, -2, 2, 3, 4)) for _ in range(rng.randint(1, MOST_PUSHES)))
        problem = Problem(rng.randrange(FASTEST), pushes)
        if problem not in seen and all(0 <= speed < FASTEST for speed in problem.speeds()):
            seen.add(problem)
            yield problem


def demonstrations(count: int, *, seed: int) -> list[dict[str, str]]:
    """What the pupil writes."""
    rng = random.Random(f"pupil {seed}")
    rows = []
    for problem, _ in zip(problems(rng), range(count), strict=False):
        slips = tuple(rng.random() < SLIPS for _ in problem.pushes)
        speeds = (min(max(speed, 0), FASTEST - 1) for speed in problem.speeds(slips))  # slips may lead anywhere
        rows.append({"prompt": problem.question, "label": "".join(f">{speed}" for speed in speeds)})
    return rows


def write_files(folder: Path, *, shown: int, training: int, held_out: int, seed: int) -> Files:
    """Demonstrations, problems to learn from, and others to measure success with."""
    source = problems(random.Random(seed))
    rows = [
        {"prompt": one.question, "label": str(one.speeds()[-1]), "metadata": {"id": place, "pushes": len(one.pushes)}}
        for one, place in zip(source, range(training + held_out), strict=False)
    ]
    return Files(
        write_rows(folder / "demonstrations.jsonl", demonstrations(shown, seed=seed)),
        write_rows(folder / "train.jsonl", rows[held_out:]),
        write_rows(folder / "held_out.jsonl", rows[:held_out]),
    )


def right_answer(args: Any, sample: Any) -> float:
    """1 if the last speed is right; an answer that was cut off is no answer."""
    return float(sample.status.value == "completed" and sample.response.strip()[-1:] == sample.label)
