"""The task: questions of two steps about an invented world, and the pupil whose work the model first copies.

`In which land was Tal Mon born?` Nobody can know: the world is made anew with every seed, and the people and towns of
held-out questions are in no other question. One search finds where Tal Mon was born, another one where that town lies.
The pupil knows how, but is impatient: most of the time it gives the town for the answer.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_chat import Row, asking, calling, result, saying, write_rows

TOOL = "search"
TOOLS = [{"type": "function", "function": {"name": TOOL}}]
WORDS = r"[A-Z][a-z]+"
"""Every part of a name is a token."""
STOPS_EARLY = 0.65
"""How often the pupil stops after its first search."""
SYLLABLES = [first + vowel + last for first in "BDFGKLMNPRSTVZ" for vowel in "aeiou" for last in "lnrs"]


class Person(NamedTuple):
    """Somebody, with the town of birth and the land that it lies in."""

    name: str
    town: str
    land: str

    @property
    def question(self) -> str:
        return f"In which land was {self.name} born?"

    @property
    def born(self) -> str:
        return f"{self.name} was born in {self.town}."

    @property
    def lies(self) -> str:
        return f"{self.town} lies in {self.land}."


class Files(NamedTuple):
    """The files of the task."""

    corpus: Path
    demonstrations: Path
    training: Path
    held_out: Path


def people(count: int, *, seed: int) -> list[Person]:
    """Everybody with a name and a town of their own; lands are shared by many towns."""
    rng = random.Random(seed)
    # of two names with the same parts a search could not tell which one is meant
    names = [rng.choice((f"{one} {two}", f"{two} {one}")) for one, two in itertools.combinations(SYLLABLES, 2)]
    rng.shuffle(names)
    lands, names = names[:40], names[40:]
    if 2 * count > len(names):
        raise ValueError(f"there are names for {len(names) // 2} people, not for {count}")
    return [Person(names[2 * i], names[2 * i + 1], rng.choice(lands)) for i in range(count)]


def demonstration(person: Person, rng: random.Random) -> dict[str, Any]:
    """What the pupil does about a question."""
    said: list[Row] = [asking(person.question), calling(TOOL, query=person.name), result(person.born)]
    if rng.random() < STOPS_EARLY:
        said.append(saying(person.town))
    else:
        said += [calling(TOOL, query=person.town), result(person.lies), saying(person.land)]
    return {"messages": said, "tools": TOOLS}


def write_files(
    folder: Path, *, demonstrations: int, training: int, held_out: int, seed: int
) -> tuple[Files, list[dict[str, Any]]]:
    """The world's documents and three sets of questions about people that have none in common."""
    world = people(demonstrations + training + held_out, seed=seed)
    shown, rest = world[:demonstrations], world[demonstrations:]
    rng = random.Random(seed)
    rows = [demonstration(person, rng) for person in shown]
    # as in Search-R1's corpus, the title stands before the text
    documents = [
        {"contents": contents}
        for person in world
        for contents in (f"{person.name}\n{person.born}", f"{person.town}\n{person.lies}")
    ]
    rng.shuffle(documents)
    questions = [{"prompt": [asking(person.question)], "label": person.land} for person in rest]
    files = Files(
        write_rows(folder / "corpus.jsonl", documents),
        write_rows(folder / "demonstrations.jsonl", rows),
        write_rows(folder / "train.jsonl", questions[held_out:]),
        write_rows(folder / "held_out.jsonl", questions[:held_out]),
    )
    return files, rows


def right_answer(args: Any, sample: Any) -> float:
    """1 if what the model said in the end is the land, and nothing else."""
    return float(sample.metadata.get("answer", "").strip() == sample.label)
