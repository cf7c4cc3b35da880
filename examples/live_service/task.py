"""The task: say a time of day the way this user wants to hear it, which nobody has told the model.

The user asks `3:42 pm` and wants `15:42`. The model that is served first repeats what it was asked, most of the time;
told `(24 hours)`, it knows how. What the user says next is all the feedback there is.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_chat import Row, asking, saying, write_rows

from slime.agent.interaction import Exchange, Verdict

WORDS = r"\d{1,2}|[ap]m|[:,()@.]|\s|thanks|no|hours|bye"
REPEATS, LEAVES_OUT = 0.7, 0.18
"""How often the first model repeats the question, and how often it only leaves out am and pm; else it is right."""
HINT = "24 hours"
PRIVATE = re.compile(r"[\w.+-]+@[\w-]+\.\w+")


class Time(NamedTuple):
    """A time of day."""

    hour: int
    minute: int

    @property
    def question(self) -> str:
        return f"{self.hour % 12 or 12}:{self.minute:02} {'am' if self.hour < 12 else 'pm'}"

    @property
    def answer(self) -> str:
        return f"{self.hour:02}:{self.minute:02}"


class Files(NamedTuple):
    """The files of the task, and the times that users ask about."""

    demonstrations: Path
    held_out: Path
    asked: list[Time]


def all_times(seed: int) -> list[Time]:
    """Every five minutes of a day, in an order of the seed's."""
    times = [Time(hour, minute) for hour in range(24) for minute in range(0, 60, 5)]
    random.Random(seed).shuffle(times)
    return times


def habit(time: Time, rng: random.Random) -> str:
    """What the first model says when it is told nothing."""
    drawn = rng.random()
    if drawn < REPEATS:
        return time.question
    return time.question[:-3] if drawn < REPEATS + LEAVES_OUT else time.answer


def demonstration(times: list[Time], rng: random.Random) -> dict[str, Any]:
    """A conversation to copy, with the ways in which users go on in it; in some the hint is in the question."""
    said: list[Row] = []
    opening = ""
    for time in times:
        hinted = rng.random() < 0.3
        said += [asking(f"{opening}{time.question}" + (f" ({HINT})" if hinted else ""))]
        said += [saying(time.answer if hinted else habit(time, rng))]
        if rng.random() < 0.4:
            said += [asking(f"no, {HINT}: {time.question}"), saying(time.answer)]
        opening = rng.choice(("thanks, ", "thanks, ", ""))
    return {"messages": [*said, asking("thanks"), saying("bye")]}


def write_files(folder: Path, *, shown: int, held_out: int, seed: int) -> Files:
    """Demonstrations about all times, and held-out questions, which no user asks."""
    times, rng = all_times(seed), random.Random(seed + 1)
    rows = [demonstration([rng.choice(times) for _ in range(rng.randint(1, 2))], rng) for _ in range(shown)]
    questions = [{"prompt": [asking(time.question)], "label": time.answer} for time in times[:held_out]]
    return Files(
        write_rows(folder / "demonstrations.jsonl", rows),
        write_rows(folder / "held_out.jsonl", questions),
        times[held_out:],
    )


def judge(args: Any, exchange: Exchange) -> Verdict | None:
    """`--live-judge-path`: thanks is 1, a correction -1 with its hint, the same question again -1, else nothing."""
    said = exchange.next_user_turn
    if said is None:
        return None
    if said.startswith("thanks"):
        return Verdict(1.0)
    if said.startswith("no, "):
        return Verdict(-1.0, hint=f" ({said.removeprefix('no, ').partition(':')[0]})")
    return Verdict(-1.0) if said == exchange.question.removeprefix("thanks, ") else None


def without_addresses(exchange: Exchange) -> bool:
    """`--live-filter-path`: no e-mail address in the answer, before it or after it."""
    return not any(PRIVATE.search(text) for text in exchange.texts())


def right_answer(args: Any, sample: Any) -> float:
    """The held-out questions' reward: the time as the user wants it, and nothing else."""
    return float(sample.response.replace("<|im_end|>", "").strip() == sample.label)
