"""Read-only queries of a journal, also during its run, and decoding of token ids to text.

Invariants: nothing is written, and all results of one `Reader` come from one snapshot of the journal. Decoded texts of
neighbouring spans concatenate to the text of the whole, except for characters split between spans. Of the model, only
the tokenizer is read, and no code from its folder is run.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from slime.data.buffer.database import STATES, has_evaluations, open_read_only
from slime.data.buffer.rows import COLUMNS, RowCodec
from slime.data.chat_template import load_tokenizer
from slime.data.sample import Sample
from slime.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
"""Sort keys of samples; for evaluations `rollout` is the step."""


@dataclass(frozen=True)
class Choice:
    """Filter and order of samples, of training or of evaluations; None means all, and in recorded order."""

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

    def condition(self) -> tuple[str, list[object]]:
        """Return the filter as an SQL condition with its values."""
        terms: dict[str, object] = {
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
        terms = {term: value for term, value in terms.items() if value is not None}
        return " AND ".join(terms) or "TRUE", list(terms.values())

    def order(self) -> str:
        """Return the SQL order: the sort key with missing values last, then the recorded order."""
        recorded = "step, evaluations.id, s.id" if self.evaluations else "groups.id, member, leaf"
        if self.sort is None:
            return recorded
        key = _SORTS.get(self.sort, "step" if self.evaluations else "rollout_id")
        return f"{key} IS NULL, {key} {'DESC' if self.descending else 'ASC'}, {recorded}"


@dataclass(frozen=True)
class JournaledSample:
    """A sample with its state, or with the evaluation that it was sampled in."""

    sample: Sample
    reward: float | None
    """The number shown; for a dict reward its `--reward-key` entry."""
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
        """Count samples by state, in life-cycle order."""
        found = dict(self._connection.execute(f"SELECT state, COUNT(*) {_OF_TRAINING} GROUP BY state").fetchall())
        return {state: found[state] for state in STATES if state in found}

    def evaluations(self) -> list[tuple[str, list[int]]]:
        """Return the datasets, each with the steps of its evaluations."""
        found: dict[str, list[int]] = {}
        if self._has_evaluations:
            for dataset, step in self._connection.execute("SELECT dataset, step FROM evaluations ORDER BY step, id"):
                found.setdefault(dataset, []).append(step)
        return list(found.items())

    def count(self, choice: Choice) -> int:
        """Count the chosen samples."""
        ((count,),) = self._found(choice, "COUNT(*)") or [(0,)]
        return int(count)

    def samples(self, choice: Choice, limit: int | None = None) -> Iterator[JournaledSample]:
        """Iterate over the chosen samples in order."""
        source = _OF_EVALUATIONS if choice.evaluations else _OF_TRAINING
        place = "step, dataset" if choice.evaluations else "state, rollout_id, consumed_by"
        # first only ids, so that payloads are not sorted
        chosen = self._found(choice, "s.id", f"ORDER BY {choice.order()} LIMIT {-1 if limit is None else limit}")
        names = place.split(", ")
        for (row_id,) in chosen:
            row = self._connection.execute(f"SELECT {place}, {_COLUMNS} {source} WHERE s.id = ?", (row_id,)).fetchone()
            where = dict(zip(names, row, strict=False))
            columns = row[len(names) :]
            sample = self._rows.sample_or_failure(row_id, columns, check=False)
            if choice.evaluations:
                sample.journal_id = None  # it is an id of another table
            yield JournaledSample(sample, reward=columns[COLUMNS.index("reward")], **where)

    def _found(self, choice: Choice, what: str, order: str = "") -> list[tuple[int]]:
        if choice.evaluations and not self._has_evaluations:
            return []
        condition, values = choice.condition()
        source = _OF_EVALUATIONS if choice.evaluations else _OF_TRAINING
        return self._connection.execute(f"SELECT {what} {source} WHERE {condition} {order}", values).fetchall()

    def some_prompts(self, *, evaluations: bool, most: int = 20) -> list[str]:
        """Return prompts of recent samples, from which shared template text is detected."""
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
    """Open a snapshot of the journal of a run folder, or of a journal file."""
    with open_read_only(journal_path(run)) as connection:
        connection.execute("BEGIN")
        yield Reader(connection)


def journal_path(run: str) -> Path:
    """Resolve a run folder or journal file to the journal file; a `UserError` if it does not exist."""
    path = Path(run)
    if path.is_dir():
        path = path / NAME
        if not path.exists():
            raise UserError(f"{run}: has no {NAME}; give the folder of a run (its --output-dir)")
    if not path.is_file():
        raise UserError(f"{run}: no such run folder or journal file; give the folder of a run (its --output-dir)")
    return path


_CONTEXT = 4
"""Tokens before a span that are decoded with it, because some tokenizers drop a space at the start of a text."""


class TokenDecoder:
    """Decodes token ids, including special tokens, with a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}

    def pieces(self, tokens: Sequence[int], start: int, stop: int) -> list[tuple[str, bool]]:
        """Decode `tokens[start:stop]` as pieces of text; the flag marks pieces made of special tokens."""
        found = []
        for special, members in groupby(range(start, stop), key=lambda place: tokens[place] in self._special):
            places = list(members)
            if special:
                found.append(("".join(self._special[tokens[place]] for place in places), True))
                continue
            begin, end = places[0], places[-1] + 1
            first = max(0, begin - _CONTEXT)
            before = self._decoded(tokens[first:begin])
            whole = self._decoded(tokens[first:end])
            text = whole[len(before) :] if whole.startswith(before) else self._decoded(tokens[begin:end])
            found.append((text, False))
        return found

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_decoder(folder: str) -> TokenDecoder:
    """Load the decoder of a model folder; a `UserError` if its tokenizer cannot be used."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        backend = getattr(load_tokenizer(folder), "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"{folder}: its tokenizer is written in Python; tokens are shown with tokenizer.json only")
        return TokenDecoder(backend)
    from tokenizers import Tokenizer

    try:
        return TokenDecoder(Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises no narrower class
        raise UserError(f"{file}: does not load ({error})") from error


def model_of_run(run: Path) -> str | None:
    """Return the model folder named in the config of a run, if it still exists."""
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
