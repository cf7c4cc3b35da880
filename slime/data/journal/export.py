"""Samples of a journal as a file: JSON lines, or Parquet.

Invariant: every field of every chosen sample is in the file, extra attributes too, beside its place: state, rollout and
step of training, or step and dataset of an evaluation. The
file appears whole or not at all, and never in the place of another one. A line of JSON is what `jsonable` reads back;
in Parquet, numbers per token are lists, and fields of no fixed type are JSON text.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from slime.data.journal.reader import Recorded
from slime.data.jsonable import to_json
from slime.data.sample import Sample
from slime.errors import RunFailed, UserError

_ROWS_PER_GROUP = 512
_INTS = ("group_index", "index", "rollout_id", "response_length", "journal_id", "batch", "consumed_by", "step")
_INT_LISTS = ("tokens", "loss_mask", "rollout_top_p_token_ids", "rollout_top_p_token_offsets")
_FLOAT_LISTS = ("rollout_log_probs", "teacher_log_probs")
_TEXTS = ("response", "status", "failure", "session_id", "state", "dataset")
_FLOATS = ("non_generation_time",)


def export(path: Path, found: Iterable[Recorded]) -> int:
    """Write samples to a new .jsonl or .parquet file; how many."""
    writers: dict[str, Callable[[Path, Iterable[Recorded]], int]] = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in writers:
        raise UserError(f"--export {path}: name a file that ends in .jsonl or .parquet")
    if path.exists():
        raise UserError(f"--export {path}: exists already; choose another name")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        count = writers[path.suffix](temporary, found)
        temporary.replace(path)
    except OSError as error:
        raise RunFailed(f"--export {path}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _jsonl(path: Path, found: Iterable[Recorded]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for record in found:
            file.write(json.dumps(_fields(record), ensure_ascii=True) + "\n")
            count += 1
    return count


def _parquet(path: Path, found: Iterable[Recorded]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        **dict.fromkeys(_INTS, pa.int64()),
        **dict.fromkeys(_INT_LISTS, pa.list_(pa.int64())),
        **dict.fromkeys(_FLOAT_LISTS, pa.list_(pa.float64())),
        **dict.fromkeys(_FLOATS, pa.float64()),
    }
    chunks = _chunks(found)
    first = next(chunks, [])
    names = [*(_place(first[0]) if first else ()), *Sample.__dataclass_fields__, "more"]
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in names])
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for records in chain([first] if first else [], chunks):
            rows = [_parquet_row(_fields(record), names, kinds) for record in records]
            try:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise UserError(
                    f"--export: samples {rows[0]['index']} to {rows[-1]['index']} do not fit into Parquet ({error}); "
                    "export to .jsonl"
                ) from error
            count += len(rows)
    return count


def _fields(record: Recorded) -> dict[str, Any]:
    """All of a sample as JSON values, after its place."""
    sample = {
        key: to_json(_without_bytes(value), f"sample {record.sample.index}, {key}")
        for key, value in record.sample.to_dict().items()
    }
    return {**_place(record), **sample}


def _place(record: Recorded) -> dict[str, Any]:
    """`batch` is the rollout that a sample is assigned to, beside `rollout_id`, the sample's own field."""
    if record.dataset is not None:
        return {"step": record.step, "dataset": record.dataset}
    return {"state": record.state, "batch": record.rollout_id, "consumed_by": record.consumed_by}


def _parquet_row(fields: dict[str, Any], names: list[str], kinds: dict[str, Any]) -> dict[str, Any]:
    more = {name: value for name, value in fields.items() if name not in names}
    row = {name: fields.get(name) for name in names} | {"more": more or None}
    for name, value in row.items():
        if name not in kinds and value is not None and not (name in _TEXTS and isinstance(value, str)):
            row[name] = json.dumps(value)
        elif isinstance(value, str):
            row[name] = value.encode("utf-8", "replace").decode("utf-8")
    return row


def _without_bytes(value: Any) -> Any:
    """Bytes as base64 text, and keys as text, since JSON knows no others."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, list | tuple):
        plain = isinstance(value, list) and (not value or isinstance(value[0], int | float))
        return value if plain else [_without_bytes(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _without_bytes(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _chunks(found: Iterable[Recorded]) -> Iterator[list[Recorded]]:
    records = iter(found)
    while chunk := list(islice(records, _ROWS_PER_GROUP)):
        yield chunk
