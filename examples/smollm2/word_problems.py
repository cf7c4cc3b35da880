"""The task: one-step word problems whose answer is a number. No question is both trained on and evaluated."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

SYSTEM = "Answer with the number only."
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
    "*": [
        "{name} buys {a} bags with {b} {thing} each. How many {thing} is that?",
        "There are {a} shelves, and each holds {b} {thing}. How many {thing} are there in total?",
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


def make_question(rng: random.Random) -> dict[str, Any]:
    """One row of a prompt file: chat messages, and the answer as the label."""
    kind = rng.choice("+-*")
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    if kind == "-":
        a, b = max(a, b) + 1, min(a, b)
    elif kind == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 12)
    answer = {"+": a + b, "-": a - b, "*": a * b}[kind]
    text = rng.choice(TEMPLATES[kind]).format(a=a, b=b, name=rng.choice(NAMES), thing=rng.choice(THINGS))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return {"messages": messages, "label": str(answer), "metadata": {"kind": kind}}


def write_questions(folder: Path, *, training: int, held_out: int, seed: int) -> tuple[Path, Path]:
    """Distinct questions: the files of the training ones and of the held-out ones."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < training + held_out:
        row = make_question(rng)
        rows[row["messages"][-1]["content"]] = row
    folder.mkdir(parents=True, exist_ok=True)
    distinct = list(rows.values())
    paths = folder / "train.jsonl", folder / "eval.jsonl"
    for path, chosen in zip(paths, (distinct[held_out:], distinct[:held_out]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return paths
