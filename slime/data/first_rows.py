"""The first rows of a prompt file, for whoever wants to know what is in it before reading it whole.

Invariant: rows and their places are those that `open_rows` gives, and a bounded part of the file is read: a look at a
file of any size takes milliseconds. Only a slice that counts from the end is found by going through the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from slime.data.prototype import Located
from slime.data.rows import chosen_columns, open_rows, parse_line, split_slice
from slime.errors import UserError

MOST_ROWS = 100
MOST_BYTES = 1_000_000


def read_first_rows(path: str, *, columns: set[str], most_rows: int = MOST_ROWS) -> list[Located]:
    """Up to `most_rows` rows of a JSONL or Parquet file, `path@[a:b]` included; at least one, or a `UserError`."""
    file, chosen = split_slice(path)
    start, stop = chosen.start or 0, chosen.stop
    if stop is not None and stop >= 0:
        most_rows = min(most_rows, stop - start)
    if start < 0 or (stop is not None and stop < 0) or most_rows <= 0:
        return _indexed(path, columns, most_rows)
    if Path(file).suffix == ".jsonl":
        rows = list(itertools.islice(_lines(Path(file), start), most_rows))
    elif Path(file).suffix == ".parquet":
        rows = list(itertools.islice(_batches(Path(file), start, columns, most_rows), most_rows))
    else:
        return _indexed(path, columns, most_rows)
    if not rows:
        raise UserError(f"prompt data {path}: has no rows")
    return rows


def count_rows(path: str) -> int:
    """How many rows the file, or the slice of it, has."""
    return len(open_rows(path, columns=set()))


def _lines(file: Path, start: int) -> Iterator[Located]:
    read, skipped = 0, 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                if skipped < start:
                    skipped += 1
                    continue
                where = f"{file}:{number}"
                yield Located(where, parse_line(line, where))
                read += len(line)
                if read >= MOST_BYTES:
                    return
    except OSError as error:
        raise UserError(f"prompt data {file}: cannot be read ({error.strerror})") from error


def _batches(file: Path, start: int, columns: set[str], most_rows: int) -> Iterator[Located]:
    """Rows of a Parquet file from the row group on that has the first one; columns not asked for are None."""
    import pyarrow
    import pyarrow.parquet

    try:
        source = pyarrow.parquet.ParquetFile(file)
        names = source.schema_arrow.names
        wanted = chosen_columns(names, columns) or names
        first, group = 0, 0
        while group < source.num_row_groups and first + source.metadata.row_group(group).num_rows <= start:
            first += source.metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, source.num_row_groups))
        absent = {name: None for name in names if name not in wanted}
        for batch in source.iter_batches(batch_size=most_rows, row_groups=groups, columns=wanted) if groups else ():
            for row in batch.to_pylist():
                if first >= start:
                    yield Located(f"{file}: row {first}", absent | row)
                first += 1
    except (OSError, pyarrow.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"prompt data {file}: cannot be read as Parquet ({reason})") from error


def _indexed(path: str, columns: set[str], most_rows: int) -> list[Located]:
    rows = open_rows(path, columns=columns)
    return [Located(rows.where(index), rows[index]) for index in range(min(max(most_rows, 1), len(rows)))]
