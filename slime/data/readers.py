"""Random-access readers of JSONL and Parquet prompt files; each row is a JSON-like dict.

Invariant: row `i` is the same row in every reader, `where(i)` names its place in the file, and unreadable data raises a
`UserError` instead of being skipped.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from slime.errors import UserError
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from pyarrow import Table

Row = JsonObject

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$", re.DOTALL)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CACHED_ROW_GROUPS = 4


def lookup_key(row: Row, key: str) -> object:
    """Look up a key, or `outer.inner` inside nested objects; `KeyError` if it is absent.

    A column whose own name contains the dots takes precedence.
    """
    if key in row:
        return row[key]
    outer, dot, inner = key.partition(".")
    if not dot or not isinstance(row.get(outer), dict):
        raise KeyError(key)
    return lookup_key(row[outer], inner)


def chosen_columns(names: Sequence[str], keys: set[str]) -> list[str]:
    """Return the columns of a file that contain these keys."""
    return [name for name in names if name in keys or any(key.startswith(f"{name}.") for key in keys)]


class RowReader(Protocol):
    """Random access to the rows of one file."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]: ...

    def where(self, index: int) -> str: ...


def split_slice(path: str) -> tuple[str, slice]:
    """Split `file.jsonl@[a:b]` into the file and a slice of its rows; without `@[` the slice is the whole file."""
    match = _SLICE.match(path)
    if match:
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        return match["path"], slice(start, stop)
    if "@[" in path:
        raise UserError(f"prompt data {path!r}: write the slice as path@[start:stop] with whole numbers")
    return path, slice(None)


def open_rows(path: str, *, columns: set[str]) -> RowReader:
    """Open a JSONL or Parquet file, or a slice `path@[a:b]` of one; only an index is kept in memory.

    `columns` are the keys that will be read: only these columns of a Parquet file are loaded.
    """
    file, chosen = split_slice(path)
    source = Path(file)
    if not source.exists():
        raise UserError(f"prompt data {file}: no such file")
    if source.is_dir():
        raise UserError(f"prompt data {file}: is a folder; name a .jsonl or .parquet file in it")
    rows: RowReader
    if source.suffix == ".jsonl":
        rows = JsonlRows(source)
    elif source.suffix == ".parquet":
        rows = ParquetRows(source, columns)
    else:
        raise UserError(f"prompt data {file}: unsupported extension {source.suffix!r}; use .jsonl or .parquet")
    if chosen != slice(None):
        rows = SlicedRows(rows, range(len(rows))[chosen])
    if len(rows) == 0:
        raise UserError(f"prompt data {path}: has no rows")
    return rows


class JsonlRows:
    """Rows of a file with one JSON object per line; blank lines count as lines but not as rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        offsets, lines = array("q"), array("q")
        try:
            self._file = path.open("rb")
            offset = 0
            for number, line in enumerate(self._file, start=1):
                if line.strip():
                    offsets.append(offset)
                    lines.append(number)
                offset += len(line)
        except OSError as error:
            raise UserError(f"prompt data {path}: cannot be read ({error.strerror})") from error
        self._offsets = np.frombuffer(offsets, dtype=np.int64) if offsets else np.empty(0, np.int64)
        self._lines = np.frombuffer(lines, dtype=np.int64) if lines else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        self._file.seek(int(self._offsets[index]))
        return parse_line(self._file.readline(), self.where(index))

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"


def parse_line(line: bytes, where: str) -> Row:
    """Parse one line of a JSONL file."""
    try:
        row = json.loads(line.removeprefix(_BYTE_ORDER_MARK))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not valid UTF-8 ({error.reason} at byte {error.start})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, this is a {type(row).__name__}")
    return row


class ParquetRows:
    """Rows of a Parquet file; the most recently used row groups stay in memory."""

    def __init__(self, path: Path, columns: set[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"prompt data {path}: cannot be read as Parquet ({_first_line(error)})") from error
        names = self._file.schema_arrow.names
        # Without any of the wanted columns all columns are read, so that the error can list the keys of the row.
        self._columns = chosen_columns(names, columns) or names
        self._absent = {name: None for name in names if name not in self._columns}
        counts = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._cache: OrderedDict[int, Table] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._absent | self._table(group).slice(index - int(self._starts[group]), 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for group in range(len(self._starts) - 1):
            for row in self._table(group).to_pylist():
                yield self._absent | row

    def where(self, index: int) -> str:
        return f"{self._path}: row {index}"

    def _table(self, group: int) -> Table:
        import pyarrow

        if group in self._cache:
            self._cache.move_to_end(group)
            return self._cache[group]
        try:
            table = self._file.read_row_group(group, columns=self._columns)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"prompt data {self._path}: row group {group} is broken ({_first_line(error)})") from error
        self._cache[group] = table
        if len(self._cache) > _CACHED_ROW_GROUPS:
            self._cache.popitem(last=False)
        return table


class SlicedRows:
    """A contiguous slice of other rows; `where` still names the place in the file."""

    def __init__(self, rows: RowReader, indices: range) -> None:
        self._rows = rows
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._rows[self._indices[index]]

    def __iter__(self) -> Iterator[Row]:
        return (self._rows[index] for index in self._indices)

    def where(self, index: int) -> str:
        return self._rows.where(self._indices[index])


def file_bytes(path: str) -> int:
    """Return the size of the file named by `path`, with or without a slice; part of a dataset's identity."""
    return os.stat(split_slice(path)[0]).st_size


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
