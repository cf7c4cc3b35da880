"""Row readers: a prompt file as a numbered sequence of JSON-like dicts.

Invariant: row `i` is the same row whichever reader serves it, `where(i)` names it as the user would look it up, and a
file that cannot be read as promised ends in a `UserError`, never in a skipped row.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slime.errors import UserError

Row = dict[str, Any]

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$", re.DOTALL)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CACHED_ROW_GROUPS = 4


def value_at(row: Row, key: str) -> Any:
    """What a row holds under a key, or inside its objects under `outer.inner`; `KeyError` where there is nothing.

    A column whose own name has the dots goes first.
    """
    if key in row:
        return row[key]
    outer, dot, inner = key.partition(".")
    if not dot or not isinstance(row.get(outer), dict):
        raise KeyError(key)
    return value_at(row[outer], inner)


def chosen_columns(names: Sequence[str], keys: set[str]) -> list[str]:
    """The columns of a file that these keys are read from."""
    return [name for name in names if name in keys or any(key.startswith(f"{name}.") for key in keys)]


class Rows(Protocol):
    """Random access to the rows of one file."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]: ...

    def where(self, index: int) -> str: ...


def split_slice(path: str) -> tuple[str, slice]:
    """`file.jsonl@[a:b]` -> the file and the slice of its rows; without `@[` the slice is everything."""
    match = _SLICE.match(path)
    if match:
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        return match["path"], slice(start, stop)
    if "@[" in path:
        raise UserError(f"prompt data {path!r}: write the slice as path@[start:stop] with whole numbers")
    return path, slice(None)


def open_rows(path: str, *, columns: set[str]) -> Rows:
    """The rows of a JSONL or Parquet file, `path@[a:b]` included; nothing but an index is held in memory.

    `columns` are the keys that will be asked for: a Parquet file is read at these only.
    """
    file, chosen = split_slice(path)
    source = Path(file)
    if not source.exists():
        raise UserError(f"prompt data {file}: no such file")
    if source.is_dir():
        raise UserError(f"prompt data {file}: is a folder; name a .jsonl or .parquet file in it")
    rows: Rows
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
    """One JSON object per line; blank lines do not count as rows, but do count as lines."""

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
        return self._parse(index, self._file.readline())

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"

    def _parse(self, index: int, line: bytes) -> Row:
        return parse_line(line, self.where(index))


def parse_line(line: bytes, where: str) -> Row:
    """The row on one line of a JSONL file."""
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
    """The rows of a Parquet file; the few row groups used last stay in memory."""

    def __init__(self, path: Path, columns: set[str]) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"prompt data {path}: cannot be read as Parquet ({_first_line(error)})") from error
        names = self._file.schema_arrow.names
        # A file without any of the wanted columns is read whole, so that the error can name the keys there are.
        self._columns = chosen_columns(names, columns) or names
        self._absent = {name: None for name in names if name not in self._columns}
        counts = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._cache: OrderedDict[int, Any] = OrderedDict()

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

    def _table(self, group: int) -> Any:
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
    """A contiguous part of other rows; `where` still names the place in the file."""

    def __init__(self, rows: Rows, indices: range) -> None:
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
    """Size of the file behind `path` (slice or not), part of a dataset's identity."""
    return os.stat(split_slice(path)[0]).st_size


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
