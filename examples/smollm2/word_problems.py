"""The task: one-step word problems whose answer is a number. No sum is both trained on and evaluated."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

EXAMPLE = [
    {"role": "system", "content": "Answer with the number only."},
    {"role": "user", "content": "Tom has 5 cups and buys 3 more. How many cups does he have?"},
    {"role": "assistant", "content": "8"},
]
NAMES = ["Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo"]
THINGS = ["apples", "books", "coins", "pencils", "stamps", "marbles", "cards", "shells", "stickers", "eggs"]
TEMPLATES = {
    "+": [
        "{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
        "{name} finds {a} {thing} on Monday and {b} on Tuesday. How many {thing} is that in total?",
        "There are {a} {thing} in one box and {b} in another. How many {thing} are there together?",
    ],
    "-": [
        "{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
        "There are {a} {thing} on the table. {name} takes {b} of them. How many {thing} remain?",
        "{name} needs {a} {thing} and already has {b}. How many {thing} are missing?",
    ],
}
NUMBER = re.compile(r"\d+(?:,\d{3})*")


def last_number(text: str) -> str | None:
    """The last whole number of a text, without thousands separators."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def right_answer(args: Any, sample: Any) -> float:
    """1 if the last number of the response is the answer."""
    return float(last_number(sample.response) == sample.label)


def make_question(fact: tuple[str, int, int], rng: random.Random) -> dict[str, Any]:
    """One row of a prompt file, chat messages and the answer as the label, about `(kind, larger, smaller)`."""
    kind, a, b = fact
    answer = a + b if kind == "+" else a - b
    if kind == "+" and rng.random() < 0.5:
        a, b = b, a
    text = rng.choice(TEMPLATES[kind]).format(a=a, b=b, name=rng.choice(NAMES), thing=rng.choice(THINGS))
    messages = [*EXAMPLE, {"role": "user", "content": text}]
    return {"messages": messages, "label": str(answer), "metadata": {"kind": kind}}


def write_questions(folder: Path, *, training: int, held_out: int, seed: int) -> tuple[Path, Path]:
    """`training` questions, and one about each of `held_out` facts that no training question is about."""
    rng = random.Random(seed)
    facts = [(kind, a, b) for kind in "+-" for a in range(3, 22) for b in range(2, a)]
    rng.shuffle(facts)
    chosen = [rng.choice(facts[held_out:]) for _ in range(training)], facts[:held_out]
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "eval.jsonl"
    for path, about in zip(paths, chosen, strict=True):
        path.write_text("".join(json.dumps(make_question(fact, rng)) + "\n" for fact in about))
    return paths
