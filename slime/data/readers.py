"""Random-access readers of JSONL and Parquet prompt files; each row is a JSON-like dict.

Invariant: row `i` is the same row in every reader, `where(i)` names its place in the file, and unreadable data raises a
`UserError` instead of being skipped.

`read_first_rows` reads a bounded part of a file of any size, in milliseconds, and returns the same rows and places as
`open_rows`. Only a slice that counts from the end requires a pass over the whole file.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np

from slime.errors import UserError
from slime.storage.json_types import JsonObject

if TYPE_CHECKING:
    from pyarrow import Table

Row = JsonObject

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$", re.DOTALL)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CACHED_ROW_GROUPS = 4
_ROWS_PER_BATCH = 512
MOST_ROWS = 100
MOST_BYTES = 1_000_000


@dataclass(frozen=True)
class LocatedRow:
    """A row and its place in the file."""

    where: str
    row: Row
    size: int = 0
    """Bytes of its line; 0 in a Parquet file."""


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


class RowReader(Protocol):
    """Random access to the rows of one file."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def where(self, index: int) -> str: ...

    def rows_from(self, index: int) -> Iterator[LocatedRow]: ...


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
    rows = _open_file(file, columns)
    if chosen != slice(None):
        rows = SlicedRows(rows, range(len(rows))[chosen])
    if len(rows) == 0:
        raise UserError(f"prompt data {path}: has no rows")
    return rows


def read_first_rows(path: str, *, columns: set[str], most_rows: int = MOST_ROWS) -> list[LocatedRow]:
    """Read up to `most_rows` rows of a JSONL or Parquet file or slice `path@[a:b]`; a `UserError` if there are none."""
    file, chosen = split_slice(path)
    start, stop = chosen.start or 0, chosen.stop
    if start < 0 or (stop is not None and stop < 0):
        found = open_rows(path, columns=columns).rows_from(0)
    else:
        found = _open_file(file, columns).rows_from(start)
        most_rows = most_rows if stop is None else max(0, min(most_rows, stop - start))
    rows: list[LocatedRow] = []
    size = 0
    for located in islice(found, most_rows):
        rows.append(located)
        size += located.size
        if size >= MOST_BYTES:
            break
    if not rows:
        raise UserError(f"prompt data {path}: has no rows")
    return rows


def _open_file(file: str, columns: set[str]) -> RowReader:
    source = Path(file)
    if not source.exists():
        raise UserError(f"prompt data {file}: no such file")
    if source.is_dir():
        raise UserError(f"prompt data {file}: is a folder; name a .jsonl or .parquet file in it")
    if source.suffix == ".jsonl":
        return JsonlRows(source)
    if source.suffix == ".parquet":
        return ParquetRows(source, columns)
    raise UserError(f"prompt data {file}: unsupported extension {source.suffix!r}; use .jsonl or .parquet")


class JsonlRows:
    """Rows of a file with one JSON object per line; blank lines count as lines but not as rows."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> UserError:
        return UserError(f"prompt data {self._path}: cannot be read ({error.strerror})")

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Iterate over all lines with their numbers."""
        try:
            yield from enumerate(file, start=1)
        except OSError as error:
            raise self._unreadable(error) from error

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and line numbers of the rows."""
        offsets, lines, offset = array("q"), array("q"), 0
        self._file.seek(0)
        for number, line in self._lines(self._file):
            if line.strip():
                offsets.append(offset)
                lines.append(number)
            offset += len(line)
        return np.array(offsets, dtype=np.int64), np.array(lines, dtype=np.int64)

    @cached_property
    def _file(self) -> BinaryIO:
        """The file that is indexed and read, also when another one has replaced it."""
        return self._open()

    def __len__(self) -> int:
        return len(self._index[0])

    def __getitem__(self, index: int) -> Row:
        offset = int(self._index[0][index])
        self._file.seek(offset)
        return _parse_line(self._file.readline(), self.where(index))

    def where(self, index: int) -> str:
        return f"{self._path}:{self._index[1][index]}"

    def rows_from(self, index: int) -> Iterator[LocatedRow]:
        """Iterate over the rows from `index` on, without an index of the file."""
        with self._open() as file:
            lines = ((number, line) for number, line in self._lines(file) if line.strip())
            for number, line in islice(lines, index, None):
                where = f"{self._path}:{number}"
                yield LocatedRow(where, _parse_line(line, where), len(line))


def _parse_line(line: bytes, where: str) -> Row:
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
        wanted = [name for name in names if name in columns or any(key.startswith(f"{name}.") for key in columns)]
        # Without any of the wanted columns all columns are read, so that the error can list the keys of the row.
        self._columns = wanted or names
        self._absent = {name: None for name in names if name not in self._columns}
        counts = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._cache: OrderedDict[int, Table] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._absent | self._table(group).slice(index - int(self._starts[group]), 1).to_pylist()[0]

    def where(self, index: int) -> str:
        return f"{self._path}: row {index}"

    def rows_from(self, index: int) -> Iterator[LocatedRow]:
        """Iterate over the rows from `index` on, beginning with the row group of the first one."""
        import pyarrow

        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        place, groups = int(self._starts[group]), list(range(group, len(self._starts) - 1))
        try:
            batches = (
                self._file.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=self._columns) if groups else ()
            )
            for batch in batches:
                for row in batch.to_pylist():
                    if place >= index:
                        yield LocatedRow(self.where(place), self._absent | row)
                    place += 1
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"prompt data {self._path}: cannot be read as Parquet ({_first_line(error)})") from error

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

    def where(self, index: int) -> str:
        return self._rows.where(self._indices[index])

    def rows_from(self, index: int) -> Iterator[LocatedRow]:
        return islice(self._rows.rows_from(self._indices.start + index), max(0, len(self) - index))


def count_rows(path: str) -> int:
    """Count the rows of a file or of a slice of it."""
    return len(open_rows(path, columns=set()))


def file_bytes(path: str) -> int:
    """Return the size of the file named by `path`, with or without a slice; part of a dataset's identity."""
    return os.stat(split_slice(path)[0]).st_size


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
