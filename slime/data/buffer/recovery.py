"""Journal queries for restarts, and the facts that identify the run of a journal.

Invariants: trainers resume at rollout `start`, so groups consumed by earlier rollouts stay consumed. Batches of `start`
and later rollouts are trained on again with the same groups, even if they were trained on before. Groups that were
handed out and are not in a batch return to the data source, in the order in which they were handed out.

The identity of a run describes what was sampled from what, without file locations: a moved run folder or model is the
same run; another model, other prompts or other functions are not.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.plugins import present_path
from slime.data.buffer.database import NOT_CONSUMED
from slime.data.buffer.rows import COLUMNS, GroupLeaf, RowCodec, is_unusable, rebuild_groups
from slime.data.readers import file_bytes, split_slice
from slime.data.sample import Sample
from slime.data.source import Group
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from slime.config import Config

_TEACHES = """SELECT 1 FROM groups JOIN samples ON group_id = groups.id
WHERE rollout_id = ? AND status != 'failed' AND response_length > 0 LIMIT 1"""


@dataclass(frozen=True)
class Recovered:
    """The state from which a run resumes."""

    position: JsonObject | None
    """The position of the data source after the last hand-out."""
    groups: list[Group]
    """Groups that were handed out and are not in a batch; they return to the data source."""
    batches: list[int]
    """Rollouts whose recorded batches are trained on again."""
    fresh: bool
    """The journal is empty: the data source's own saved position applies."""
    moved: Path | None = None
    """The new path of an older journal that does not match `start`."""
    moved_work: bool = False
    """True if the moved journal had more than samples for inspection."""
    unusable: list[str] = field(default_factory=list)
    """Errors of unusable rows, one sentence each; their samples have failed and are sampled again."""


def is_journal_empty(connection: sqlite3.Connection) -> bool:
    """True if nothing was recorded for a restart."""
    recorded = (  # consumed groups without a row in rollouts are kept only for inspection
        f"SELECT 1 FROM groups WHERE state IN {NOT_CONSUMED}",
        "SELECT 1 FROM rollouts",
        "SELECT 1 FROM positions",
        "SELECT 1 FROM meta WHERE key = 'position'",
    )
    return not any(connection.execute(query).fetchone() for query in recorded)


def has_progress(connection: sqlite3.Connection) -> bool:
    """True if any sample has more than its prompt."""
    row = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM samples WHERE status != 'pending' OR response_length > 0) "
        "OR EXISTS (SELECT 1 FROM evaluated_samples)"
    )
    return bool(row.fetchone()[0])


def can_resume_at(connection: sqlite3.Connection, start: int) -> bool:
    """True if the journal reached `start` and still has the data of `start` and later rollouts."""
    horizon_row = connection.execute("SELECT value FROM meta WHERE key = 'horizon'").fetchone()
    if horizon_row is None:
        return True
    horizon = int(horizon_row[0])
    last = connection.execute("SELECT MAX(rollout_id) FROM rollouts").fetchone()[0]
    return horizon <= start <= max(horizon - 1, -1 if last is None else int(last)) + 1


def mark_for_replay(connection: sqlite3.Connection, start: int, *, forget_later: bool = True) -> list[int]:
    """Mark batches before `start` as consumed; returns the ids of the others.

    With `forget_later` those are marked as assigned again.
    """
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


def drop_untrainable_batches(connection: sqlite3.Connection, batches: list[int]) -> list[int]:
    """Return the batches with anything to train on; the groups of the others are dropped."""
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


def read_leaves(
    connection: sqlite3.Connection, rows: RowCodec, condition: str, values: tuple[object, ...] = (), *, check: bool
) -> Iterator[GroupLeaf]:
    """Read the samples that match an SQL condition; with `check`, invalid samples are failed ones."""
    columns = ", ".join(f"samples.{name}" for name in COLUMNS)
    found = connection.execute(
        f"SELECT group_id, samples.id, member, leaf, {columns} FROM groups JOIN samples ON group_id = groups.id "
        f"WHERE {condition}",
        values,
    )
    for group_id, row_id, member, leaf, *encoded in found:
        sample = rows.sample_or_failure(row_id, encoded, check=check)
        yield GroupLeaf(sample, member, leaf, row_id=row_id, group_id=group_id)


def read_groups(connection: sqlite3.Connection, rows: RowCodec, where: str, values: tuple[object, ...]) -> list[Group]:
    """Read the groups that match a condition, ordered by place in the batch or else by hand-out."""
    ordered = f"{where} ORDER BY position, groups.id, member, leaf"
    return rebuild_groups(read_leaves(connection, rows, ordered, values, check=False))


def read_samples(connection: sqlite3.Connection, rows: RowCodec, row_ids: Sequence[int]) -> dict[int, Sample]:
    """Read the samples of existing, usable rows, by row id."""
    found = (leaf for one in row_ids for leaf in read_leaves(connection, rows, "samples.id = ?", (one,), check=True))
    return {leaf.row_id: leaf.sample for leaf in found if not is_unusable(leaf.sample)}


def name_of(connection: sqlite3.Connection) -> str | None:
    """Return the name of a journal; None if it has not been named yet."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'name'").fetchone()
    return None if row is None else str(row[0])


RunIdentity = dict[str, str]

_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "tekken", "tiktoken", "chat_template", "special_tokens")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def run_identity(config: Config, prompt_files: Sequence[str] | None = None) -> RunIdentity:
    """Return the facts that identify a run, by name; only a few small files are read.

    `prompt_files` are the files of `--prompt-config`; None: the file of `--prompt-data`.
    """
    if prompt_files is None:
        prompt_files = [] if config.prompt_data is None else [config.prompt_data]
    model = Path(config.hf_checkpoint)
    return {
        "model": _model(model),
        "tokenizer": _digest(file.read_bytes() for file in _tokenizer_files(model)) if model.is_dir() else str(model),
        "prompt data": "none"
        if config.disable_rollout_global_dataset
        else "; ".join(map(_file, prompt_files)) or "none",
        "data source": str(config.data_source_path),
        "rollout function": str(config.rollout_function_path),
        "generate function": present_path(config.custom_generate_function_path or "default"),
        "samples per prompt": str(config.n_samples_per_prompt),
        "rollout seed": str(config.rollout_seed),
    }


def _model(folder: Path) -> str:
    """Describe a model folder: config.json by content, weight files by name and size."""
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
