"""What a restart finds in the journal.

Invariant: the trainers go on at rollout `start`, so what earlier rollouts consumed stays consumed; batches of `start`
and later ones are trained on again, group by group as they were, whether or not that happened before; what was handed
out and is in no batch goes back to the data source, in the order in which it was handed out.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.data.buffer.rows import COLUMNS, UNUSABLE, Leaf, RowCodec, regrouped
from slime.data.buffer.schema import NOT_CONSUMED, OPEN
from slime.data.readers import file_bytes, split_slice
from slime.data.sample import Sample
from slime.data.source import Group

_TEACHES = """SELECT 1 FROM groups JOIN samples ON group_id = groups.id
WHERE rollout_id = ? AND status != 'failed' AND response_length > 0 LIMIT 1"""


@dataclass(frozen=True)
class Recovered:
    """Where a run goes on."""

    position: dict[str, Any] | None
    """Of the data source, after the last hand-out."""
    groups: list[Group]
    """Handed out and in no batch: to be put back."""
    batches: list[int]
    """Rollouts whose batches are there to be trained on again."""
    fresh: bool
    """Nothing was recorded yet: the data source's own saved position counts."""
    moved: Path | None = None
    """Where an older journal went that `start` does not fit to."""
    moved_work: bool = False
    """Whether there was more in it than samples to look at."""
    unusable: list[str] = field(default_factory=list)
    """Why rows were of no use, one sentence each: their samples have failed, and are sampled anew."""


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether nothing was ever recorded."""
    recorded = (  # consumed groups without a row in rollouts are only there to be looked at
        f"SELECT 1 FROM groups WHERE state IN {NOT_CONSUMED}",
        "SELECT 1 FROM rollouts",
        "SELECT 1 FROM positions",
        "SELECT 1 FROM meta WHERE key = 'position'",
    )
    return not any(connection.execute(query).fetchone() for query in recorded)


def has_content(connection: sqlite3.Connection) -> bool:
    """Whether there is any sample that is more than a prompt."""
    row = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM samples WHERE status != 'pending' OR response_length > 0) "
        "OR EXISTS (SELECT 1 FROM evaluated_samples)"
    )
    return bool(row.fetchone()[0])


def usable_from(connection: sqlite3.Connection, start: int) -> bool:
    """Whether the journal still has what `start` and later rollouts need, and came as far as `start`."""
    horizon_row = connection.execute("SELECT value FROM meta WHERE key = 'horizon'").fetchone()
    if horizon_row is None:
        return True
    horizon = int(horizon_row[0])
    last = connection.execute("SELECT MAX(rollout_id) FROM rollouts").fetchone()[0]
    return horizon <= start <= max(horizon - 1, -1 if last is None else int(last)) + 1


def replay_from(connection: sqlite3.Connection, start: int, *, forget_later: bool = True) -> list[int]:
    """Mark batches before `start` as consumed and (with `forget_later`) the others as not; the ids of those."""
    connection.execute(
        "UPDATE groups SET state = 'consumed', consumed_by = rollout_id WHERE rollout_id < ? AND state = 'assigned'",
        (start,),
    )
    connection.execute("UPDATE rollouts SET state = 'consumed' WHERE rollout_id < ?", (start,))
    if forget_later:
        connection.execute(
            "UPDATE groups SET state = 'assigned', consumed_by = NULL WHERE rollout_id >= ? AND state = 'consumed'",
            (start,),
        )
        connection.execute("UPDATE rollouts SET state = 'assigned' WHERE rollout_id >= ?", (start,))
    later = connection.execute("SELECT rollout_id FROM rollouts WHERE rollout_id >= ? ORDER BY rollout_id", (start,))
    return [int(row[0]) for row in later]


def unusable_rows(connection: sqlite3.Connection, rows: RowCodec) -> list[tuple[int, Sample]]:
    """Rows that a restart would stumble over, each with the failure that its sample becomes."""
    columns = ", ".join(f"samples.{name}" for name in COLUMNS)
    found = connection.execute(
        f"SELECT samples.id, {columns} FROM groups JOIN samples ON group_id = groups.id "
        f"WHERE state IN {OPEN} OR state = 'assigned'"
    )
    looked_at = ((row_id, rows.sample_or_failure(row_id, values, check=True)) for row_id, *values in found)
    return [(row_id, sample) for row_id, sample in looked_at if (sample.failure or "").startswith(UNUSABLE)]


def give_up_useless(connection: sqlite3.Connection, batches: list[int]) -> list[int]:
    """The batches in which there is anything to train on; the groups of the others are dropped."""
    useful = []
    for rollout_id in batches:
        if connection.execute(_TEACHES, (rollout_id,)).fetchone() is not None:
            useful.append(rollout_id)
            continue
        connection.execute(
            "UPDATE groups SET state = 'dropped', rollout_id = NULL, position = NULL WHERE rollout_id = ?",
            (rollout_id,),
        )
        connection.execute("DELETE FROM rollouts WHERE rollout_id = ?", (rollout_id,))
    return useful


def read_groups(connection: sqlite3.Connection, rows: RowCodec, where: str, values: tuple[Any, ...]) -> list[Group]:
    """The groups that a condition chooses: by their place in the batch, or in the order they were handed out."""
    columns = ", ".join(f"samples.{name}" for name in COLUMNS)
    found = connection.execute(
        f"SELECT group_id, samples.id, member, leaf, {columns} FROM groups JOIN samples ON group_id = groups.id "
        f"WHERE {where} ORDER BY position, groups.id, member, leaf",
        values,
    )
    return regrouped(_leaves(found, rows))


def read_samples(connection: sqlite3.Connection, rows: RowCodec, row_ids: Sequence[int]) -> dict[int, Sample]:
    """The samples of rows that are there and can be used, by row id."""
    query = f"SELECT {', '.join(COLUMNS)} FROM samples WHERE id = ?"
    found: dict[int, Sample] = {}
    for row_id in row_ids:
        columns = connection.execute(query, (row_id,)).fetchone()
        if columns is not None:
            sample = rows.sample_or_failure(row_id, columns, check=True)
            if not (sample.failure or "").startswith(UNUSABLE):
                found[row_id] = sample
    return found


def name_of(connection: sqlite3.Connection) -> str | None:
    """The name of a journal; None as long as nobody has asked for it."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'name'").fetchone()
    return None if row is None else str(row[0])


def _leaves(found: Iterator[tuple[Any, ...]], rows: RowCodec) -> Iterator[tuple[int, Leaf]]:
    for group_id, row_id, member, leaf, *columns in found:
        yield group_id, Leaf(rows.sample_or_failure(row_id, columns, check=False), member, leaf)


# The facts that make a journal the journal of this run.
#
# Invariant: they say what was sampled from what, and nothing about where files lie: a run folder or a model that moved
# is the same run, another model, other prompts or other functions are not.

RunIdentity = dict[str, str]

_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "tekken", "tiktoken", "chat_template", "special_tokens")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def run_identity(config: Any, prompt_files: Sequence[str] | None = None) -> RunIdentity:
    """Named facts of a run; none of them needs more than reading a few small files.

    `prompt_files` are those of `--prompt-config`; None: that of `--prompt-data`.
    """
    if prompt_files is None:
        prompt_files = [] if config.prompt_data is None else [config.prompt_data]
    model = Path(config.hf_checkpoint)
    return {
        "model": _model(model),
        "tokenizer": _digest(file.read_bytes() for file in _tokenizer_files(model)) if model.is_dir() else str(model),
        "prompt data": _prompts(config, prompt_files),
        "data source": str(config.data_source_path),
        "rollout function": str(config.rollout_function_path),
        "generate function": str(config.custom_generate_function_path or "default"),
        "samples per prompt": str(config.n_samples_per_prompt),
        "rollout seed": str(config.rollout_seed),
    }


def _model(folder: Path) -> str:
    """config.json by content, weight files by name and size."""
    if not folder.is_dir():
        return str(folder)
    config = folder / "config.json"
    weights = sorted(file for file in folder.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
    names = "\n".join(f"{file.name} {file.stat().st_size}" for file in weights)
    total = sum(file.stat().st_size for file in weights)
    facts = _digest([config.read_bytes() if config.is_file() else b"", names.encode()])
    return f"{facts}, {total} bytes of weights"


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and file.name.startswith(_TOKENIZER_FILES))


def _prompts(config: Any, files: Sequence[str]) -> str:
    if not files or config.disable_rollout_global_dataset:
        return "none"
    return "; ".join(map(_file, files))


def _file(path: str) -> str:
    file, chosen = split_slice(path)
    rows = "" if chosen == slice(None) else f" rows {chosen.start or 0}:{'' if chosen.stop is None else chosen.stop}"
    size = f", {file_bytes(path)} bytes" if Path(file).is_file() else ""
    return f"{Path(file).name}{rows}{size}"


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]
