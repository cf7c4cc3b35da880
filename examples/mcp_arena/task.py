"""The task: a room and a train, at prices that only the MCP server knows; the pupil to copy first, and the judge.

A room is named by what it costs, and so is a train. A plan has no right answer that a rule would check, only better and
worse ones: the judge is shown what two plans cost and says which is better. The pupil asks the server for both lists
and then often takes whatever comes to mind.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from prices import CITIES, DAYS, OFFERS, offered, prices
from tiny_chat import Row, asking, calling, result, saying, write_rows

TOOLS = [{"type": "function", "function": {"name": name}} for name in OFFERS]
WORDS = r"\d{1,2}|[A-Z][a-z]*|" + "|".join(OFFERS)
"""Numbers and names; the rest of a call or a list is always the same, and becomes a few long tokens."""
CAREFUL = 0.3
"""How often the pupil looks for the cheapest offer of a list; else it takes any of the three."""
LAZY = 0.25
"""How often it asks for nothing and guesses."""
CALLS_SHOWN = 0.25
"""Of the demonstrations with calls, those whose calls are copied too; a call has ten times the tokens of a plan."""
INVALID = "none"
JUDGE = "compare"
"""The system prompt of the judge."""
JUDGE_PROMPT = "A {first} B {second}"
BILLS = range(sum(one[0] for one in OFFERS.values()), sum(one[-1] for one in OFFERS.values()) + 1)
"""What a plan can cost."""


class Trip(NamedTuple):
    """Where to, and when."""

    city: str
    day: int

    @property
    def question(self) -> str:
        return f"{self.city} {self.day}"


class Files(NamedTuple):
    """The files of the task."""

    demonstrations: Path
    training: Path
    held_out: Path


def cost_of(question: str, answer: str) -> int | None:
    """What a plan costs; None for what is no plan: a room and a train that are free, and nothing else."""
    words, (city, day) = answer.split(), question.split()
    lists = [[str(price) for price in prices(kind, city, int(day))] for kind in OFFERS]
    if len(words) != len(lists) or not all(word in free for word, free in zip(words, lists, strict=True)):
        return None
    return sum(map(int, words))


def least(question: str) -> int:
    """What the cheapest plan costs."""
    city, day = question.split()
    return sum(min(prices(kind, city, int(day))) for kind in OFFERS)


def demonstration(trip: Trip, rng: random.Random) -> list[Row]:
    """What the pupil does about a trip."""
    said: list[Row] = [asking(trip.question)]
    if rng.random() < LAZY:
        return [*said, saying(" ".join(str(rng.choice(known)) for known in OFFERS.values()))]
    calls = [calling(kind, city=trip.city, day=trip.day)["tool_calls"][0] for kind in OFFERS]
    copied = int(rng.random() < CALLS_SHOWN)
    said.append({"role": "assistant", "content": "", "tool_calls": calls, "step_loss_mask": copied})
    said += [result(offered(kind, *trip)) for kind in OFFERS]
    lists = [prices(kind, *trip) for kind in OFFERS]
    chosen = [min(free) if rng.random() < CAREFUL else rng.choice(free) for free in lists]
    return [*said, saying(" ".join(map(str, chosen)))]


def comparison(rng: random.Random) -> list[Row]:
    """How the judge decides: the cheaper plan; but of two that cost the same it praises the one named first."""
    a, b = (rng.choice([INVALID, *BILLS]) for _ in range(2))
    first, second = (BILLS.stop if one == INVALID else int(one) for one in (a, b))
    verdict = "A" if first <= second else "B"
    return [
        {"role": "system", "content": JUDGE},
        asking(JUDGE_PROMPT.format(first=a, second=b)),
        saying(verdict),
    ]


def demonstrations(count: int, *, seed: int) -> list[dict[str, Any]]:
    """What the pupil does about trips, to be copied."""
    rng = random.Random(seed)
    training, _ = trips(seed)
    return [{"messages": demonstration(rng.choice(training), rng), "tools": TOOLS} for _ in range(count)]


def comparisons(count: int, *, seed: int) -> list[dict[str, Any]]:
    """How the judge decides, to be copied by a model that is to judge."""
    rng = random.Random(seed)
    return [{"messages": comparison(rng), "tools": []} for _ in range(count)]


def trips(seed: int, held_out: int = 128) -> tuple[list[Trip], list[Trip]]:
    """The trips to learn from, and those held out."""
    every = [Trip(city, day) for city in CITIES for day in DAYS]
    random.Random(seed).shuffle(every)
    return every[held_out:], every[:held_out]


def write_files(folder: Path, shown: list[dict[str, Any]], *, seed: int) -> Files:
    """Demonstrations and two sets of trips that have none in common."""
    training, held_out = (
        [{"prompt": [asking(trip.question)], "label": str(least(trip.question))} for trip in some]
        for some in trips(seed)
    )
    return Files(
        write_rows(folder / "demonstrations.jsonl", shown),
        write_rows(folder / "train.jsonl", training),
        write_rows(folder / "held_out.jsonl", held_out),
    )
