"""Looking into a journal, also while its run is going.

Invariant: nothing is ever written, and all that one `Reader` shows is the journal at one moment.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from slime.data.buffer.database import open_read_only
from slime.data.buffer.retention import has_evaluations
from slime.data.buffer.rows import COLUMNS, RowCodec
from slime.data.buffer.schema import STATES
from slime.data.chat_template import load_tokenizer
from slime.data.sample import Sample
from slime.errors import UserError

NAME = "journal.sqlite"

_COLUMNS = ", ".join(COLUMNS)
_OF_TRAINING = "FROM samples AS s JOIN groups ON groups.id = s.group_id"
_OF_EVALUATIONS = "FROM evaluated_samples AS s JOIN evaluations ON evaluations.id = s.evaluation_id"
_SORTS = {
    "reward": "reward",
    "length": "response_length",
    "index": "sample_index",
    "status": "status",
    "version": "CAST(json_extract(weight_versions, '$[0]') AS INTEGER)",
}
SORTS = (*_SORTS, "rollout")
"""What samples can be sorted by; `rollout` is the step of an evaluation."""


@dataclass(frozen=True)
class Choice:
    """Which samples, of training or of evaluations, and in which order; None means all, and as they came."""

    state: str | None = None
    rollout: int | None = None
    group: int | None = None
    sample: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    status: str | None = None
    evaluations: bool = False
    step: int | None = None
    dataset: str | None = None
    sort: str | None = None
    descending: bool = False

    def condition(self) -> tuple[str, list[Any]]:
        """As SQL with its values."""
        asked = {
            "state = ?": self.state,
            "rollout_id = ?": self.rollout,
            "group_index = ?": self.group,
            "sample_index = ?": self.sample,
            "reward >= ?": self.min_reward,
            "reward <= ?": self.max_reward,
            "status = ?": self.status,
            "step = ?": self.step,
            "dataset = ?": self.dataset,
        }
        asked = {term: value for term, value in asked.items() if value is not None}
        return " AND ".join(asked) or "TRUE", list(asked.values())

    def order(self) -> str:
        """As SQL: what is sorted by, samples without it last, then the order in which they came."""
        came = "step, evaluations.id, s.id" if self.evaluations else "groups.id, member, leaf"
        if self.sort is None:
            return came
        key = _SORTS.get(self.sort, "step" if self.evaluations else "rollout_id")
        return f"{key} IS NULL, {key} {'DESC' if self.descending else 'ASC'}, {came}"


@dataclass(frozen=True)
class Recorded:
    """A sample and where it is in its life, or in which evaluation it was sampled."""

    sample: Sample
    reward: float | None
    """The number shown, also of a reward of several."""
    state: str | None = None
    rollout_id: int | None = None
    consumed_by: int | None = None
    step: int | None = None
    dataset: str | None = None


class Reader:
    """Queries of an open journal."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._rows = RowCodec()
        self._has_evaluations = has_evaluations(connection)

    def totals(self) -> dict[str, int]:
        """Samples by state, in the order of their life."""
        found = dict(self._connection.execute(f"SELECT state, COUNT(*) {_OF_TRAINING} GROUP BY state").fetchall())
        return {state: found[state] for state in STATES if state in found}

    def evaluations(self) -> list[tuple[str, list[int]]]:
        """Datasets and the steps of their evaluations."""
        found: dict[str, list[int]] = {}
        if self._has_evaluations:
            for dataset, step in self._connection.execute("SELECT dataset, step FROM evaluations ORDER BY step, id"):
                found.setdefault(dataset, []).append(step)
        return list(found.items())

    def count(self, choice: Choice) -> int:
        """How many samples are chosen."""
        if choice.evaluations and not self._has_evaluations:
            return 0
        condition, values = choice.condition()
        source = _OF_EVALUATIONS if choice.evaluations else _OF_TRAINING
        return int(self._connection.execute(f"SELECT COUNT(*) {source} WHERE {condition}", values).fetchone()[0])

    def samples(self, choice: Choice, limit: int | None = None) -> Iterator[Recorded]:
        """Chosen samples in their order."""
        if choice.evaluations and not self._has_evaluations:
            return
        condition, values = choice.condition()
        source = _OF_EVALUATIONS if choice.evaluations else _OF_TRAINING
        chosen = self._connection.execute(  # ids alone: payloads need not be sorted
            f"SELECT s.id {source} WHERE {condition} ORDER BY {choice.order()} LIMIT ?",
            [*values, -1 if limit is None else limit],
        ).fetchall()
        place = "step, dataset" if choice.evaluations else "state, rollout_id, consumed_by"
        names = place.split(", ")
        for (row_id,) in chosen:
            row = self._connection.execute(f"SELECT {place}, {_COLUMNS} {source} WHERE s.id = ?", (row_id,)).fetchone()
            where = dict(zip(names, row, strict=False))
            columns = row[len(names) :]
            sample = self._rows.sample_or_failure(row_id, columns, check=False)
            if choice.evaluations:
                sample.journal_id = None  # the number of another table
            yield Recorded(sample, reward=columns[COLUMNS.index("reward")], **where)

    def some_prompts(self, *, evaluations: bool, most: int = 20) -> list[str]:
        """Prompts of different samples: what they have in common is not what is asked."""
        if not evaluations:
            query = (
                "SELECT (SELECT prompt FROM samples WHERE group_id = groups.id) FROM groups ORDER BY id DESC LIMIT ?"
            )
        elif self._has_evaluations:
            query = "SELECT prompt FROM evaluated_samples ORDER BY id DESC LIMIT ?"
        else:
            return []
        return [row[0] for row in self._connection.execute(query, (most,)) if row[0] is not None]


@contextmanager
def reading(run: str) -> Iterator[Reader]:
    """The journal of a run folder, or a journal file, at this moment."""
    with open_read_only(journal_path(run)) as connection:
        connection.execute("BEGIN")
        yield Reader(connection)


def journal_path(run: str) -> Path:
    """The journal file that `run` means; a `UserError` when there is none."""
    path = Path(run)
    if path.is_dir():
        path = path / NAME
        if not path.exists():
            raise UserError(f"{run}: has no {NAME}; give the folder of a run (its --output-dir)")
    if not path.is_file():
        raise UserError(f"{run}: no such run folder or journal file; give the folder of a run (its --output-dir)")
    return path


# Token ids of a run back to text, special tokens included.
#
# Invariant: the texts of neighbouring spans, one after the other, are the text of the whole as far as characters do
# not fall between spans. Nothing of the model but its tokenizer is read, and no code of its folder is run.

_CONTEXT = 4
"""Tokens before a span that it is decoded with: some tokenizers leave out a space at the beginning."""


class Decoder:
    """Decodes with a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}

    def pieces(self, tokens: Sequence[int], start: int, stop: int) -> list[tuple[str, bool]]:
        """The text of `tokens[start:stop]` in pieces, each of which is special tokens or has none of them."""
        found = []
        for special, members in groupby(range(start, stop), key=lambda place: tokens[place] in self._special):
            places = list(members)
            if special:
                found.append(("".join(self._special[tokens[place]] for place in places), True))
            else:
                found.append((self._text(tokens, places[0], places[-1] + 1), False))
        return found

    def _text(self, tokens: Sequence[int], start: int, stop: int) -> str:
        first = max(0, start - _CONTEXT)
        before = self._decoded(tokens[first:start])
        whole = self._decoded(tokens[first:stop])
        return whole[len(before) :] if whole.startswith(before) else self._decoded(tokens[start:stop])

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_decoder(folder: str) -> Decoder:
    """The decoder of a model folder; a `UserError` when its tokenizer cannot be used."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        backend = getattr(load_tokenizer(folder), "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"{folder}: its tokenizer is written in Python; tokens are shown with tokenizer.json only")
        return Decoder(backend)
    from tokenizers import Tokenizer

    try:
        return Decoder(Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{file}: does not load ({error})") from error


def model_of_run(run: Path) -> str | None:
    """The model folder that the config of a run names, if it is still there."""
    import yaml

    config = run / "config.yaml"
    if not config.is_file():
        return None
    try:
        facts = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{config}: is not readable YAML ({error})") from error
    folder = facts.get("hf_checkpoint") if isinstance(facts, dict) else None
    return folder if isinstance(folder, str) and Path(folder).is_dir() else None
