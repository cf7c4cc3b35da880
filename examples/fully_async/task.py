"""The task: notes that say where to look next, in an archive that sometimes takes its time.

`47` asks for what note 47 leads to. Reading it (a tool) gives `see 08`, or a value such as `=42`; two or three notes
lead to a value, which is the answer. Every task has notes of its own. The pupil whose work the model first copies knows
how to read, and is impatient: most of the time it gives the number of the next note for the answer.

Each task to train on has a time that every one of its reads takes, drawn from a Pareto distribution: mostly a tenth of
a second or less, in one task of eleven more than a second. Held-out tasks are read at once: only their answers count.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_chat import Row, asking, calling, result, saying, write_rows

TOOL = "read"
TOOLS = [{"type": "function", "function": {"name": TOOL}}]
WORDS = r"\d\d|=|see "
"""Notes and values are two digits: a token."""
STOPS_EARLY = 0.55
"""How often the pupil, told where to look next, gives up and guesses."""
READ_S, TAIL, LONGEST_READ_S = 0.05, 0.8, 2.0
"""The time of a read: the shortest, the exponent of the distribution, and where it is cut."""


class Files(NamedTuple):
    """The files of the task."""

    demonstrations: Path
    training: Path
    held_out: Path


class Chain(NamedTuple):
    """Notes, each of which says where the next one is, and the value that the last one has."""

    notes: tuple[str, ...]
    value: str

    def contents(self) -> dict[str, str]:
        """What each note says."""
        said = [f"see {note}" for note in self.notes[1:]] + [f"={self.value}"]
        return dict(zip(self.notes, said, strict=True))


def chains(rng: random.Random) -> Iterator[Chain]:
    """No two alike."""
    seen: set[Chain] = set()
    while True:
        *notes, value = (f"{number:02d}" for number in rng.sample(range(100), rng.choice((3, 3, 4))))
        chain = Chain(tuple(notes), value)
        if chain not in seen:
            seen.add(chain)
            yield chain


def demonstration(chain: Chain, rng: random.Random) -> list[Row]:
    """What the pupil does."""
    said: list[Row] = [asking(chain.notes[0])]
    for note, text in chain.contents().items():
        said += [calling(TOOL, note=note), result(text)]
        if text.startswith("see ") and rng.random() < STOPS_EARLY:
            return [*said, saying(text.removeprefix("see "))]
    return [*said, saying(chain.value)]


def read_seconds(rng: random.Random) -> float:
    """How long each read of a task takes."""
    return min(LONGEST_READ_S, READ_S * rng.paretovariate(TAIL))


def write_files(
    folder: Path, *, demonstrations: int, training: int, held_out: int, seed: int
) -> tuple[Files, list[dict[str, Any]]]:
    """Demonstrations and two sets of tasks, all of them different; and the demonstrations themselves."""
    rng = random.Random(seed)
    source = chains(rng)
    shown = [{"messages": demonstration(next(source), rng), "tools": TOOLS} for _ in range(demonstrations)]
    return Files(
        write_rows(folder / "demonstrations.jsonl", shown),
        write_rows(folder / "train.jsonl", [_row(next(source), read_seconds(rng)) for _ in range(training)]),
        write_rows(folder / "held_out.jsonl", [_row(next(source), 0.0) for _ in range(held_out)]),
    ), shown


def _row(chain: Chain, read_s: float) -> Row:
    archive = {"notes": chain.contents(), "read_s": round(read_s, 3)}
    return {"prompt": [asking(chain.notes[0])], "label": chain.value, "metadata": archive}


def right_answer(args: Any, sample: Any) -> float:
    """1 if what the model said in the end is the value, and nothing else."""
    return float(sample.metadata.get("answer", "").strip() == sample.label)
