"""Columns of a sample: numbers stored in packed arrays that plugins see as lists.

Invariants: reading the attribute returns a list, and that list is the column until the sample is compacted again:
writes into it count, and an append extends it. A list that was set and not read since may be shared with its setter, so
an append leaves it unchanged. Packing is lossless: ids are int32 (int64 where that is too small), log-probs float32
wherever that is exact and float64 elsewhere, and a list with anything but integers or floats in it stays a list. A
packed array is never written to, so copies of a sample share it.
"""

from __future__ import annotations

import threading
from array import array

import numpy as np

_NARROW = {"b": np.int8, "i": np.int32, "q": np.int64}


class _Buffer:
    """Memory with spare room after the used part; the holder of the last entry may claim more of it."""

    __slots__ = ("_lock", "array", "used")

    def __init__(self, content: np.ndarray, used: int) -> None:
        self.array = content
        self.used = used
        self._lock = threading.Lock()

    def claim(self, end: int, count: int) -> bool:
        """Reserve the `count` places after `end` for the caller; False when they are taken or out of range."""
        with self._lock:
            if self.used != end or end + count > len(self.array):
                return False
            self.used += count
            return True


class PackedArray:
    """Read-only array of numbers; appending returns a longer one and costs only the appended part."""

    __slots__ = ("_buffer", "array", "digest", "high", "is_finite", "length", "low", "total")

    def __init__(self, content: np.ndarray | _Buffer, length: int | None = None) -> None:
        self._buffer = content if isinstance(content, _Buffer) else _Buffer(content, len(content))
        self.length = self._buffer.used if length is None else length
        self.array = self._buffer.array[: self.length]
        """The numbers, read-only."""
        self.array.setflags(write=False)
        self.low: int | None = None
        self.high: int | None = None
        """The minimum and maximum of integers; None before `look`."""
        self.total: int | None = None
        """The sum of int8 numbers; None before `look`."""
        self.is_finite: bool | None = None
        """True if all floats are finite; None before `look`."""
        self.digest: bytes | None = None
        """A hash of the numbers; None until the journal computes it."""

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"<{self.length} packed {self.array.dtype}>"

    def __deepcopy__(self, _memo: dict[int, object]) -> PackedArray:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return PackedArray, (np.ascontiguousarray(self.array),)

    def look(self) -> None:
        """Compute `low`, `high`, `total` and `is_finite` once: packed numbers do not change."""
        held = self.array
        if held.dtype.kind == "f" and self.is_finite is None:
            self.is_finite = bool(np.isfinite(held).all())
        elif held.dtype.kind == "i" and self.low is None and len(held):
            self.low, self.high = (int(held[0]),) * 2 if is_constant(held) else (int(held.min()), int(held.max()))
            if held.dtype == np.int8:
                self.total = self.low * len(held) if is_constant(held) else int(held.sum())

    def moved(self, same: np.ndarray) -> PackedArray:
        """Return these numbers in other memory, `same`, with the statistics computed so far."""
        twin = PackedArray(same)
        twin.array = same  # the array itself and not a slice: its base identifies the memory
        same.setflags(write=False)
        twin.low, twin.high, twin.total, twin.is_finite = self.low, self.high, self.total, self.is_finite
        twin.digest = self.digest
        return twin

    def tolist(self) -> list[float]:
        """Return the numbers as a new list."""
        return self._buffer.array[: self.length].tolist()

    def grown(self, more: np.ndarray) -> PackedArray:
        """Return these numbers followed by `more`; this array is unchanged."""
        if not len(more):
            return self
        mine = self._buffer.array
        if is_constant(mine) and is_constant(more) and mine[0] == more[0]:
            return PackedArray(_repeated(mine[0], self.length + len(more)))
        kind, end = np.promote_types(mine.dtype, more.dtype), self.length + len(more)
        if kind == mine.dtype and not is_constant(mine) and self._buffer.claim(self.length, len(more)):
            mine[self.length : end] = more
            return PackedArray(self._buffer, end)
        room = np.empty(end + end // 2, dtype=kind)
        room[: self.length] = mine[: self.length]
        room[self.length : end] = more
        return PackedArray(_Buffer(room, end), end)

    def compacted(self) -> PackedArray:
        """Return the same numbers without spare room; int8 numbers that are all equal take no memory."""
        held = self.array
        if is_constant(held):
            return self
        if held.dtype == np.int8 and len(held) and (held == held[0]).all():
            slim = PackedArray(_repeated(held[0], len(held)))
        elif len(held) == len(self._buffer.array):
            return self
        else:
            slim = PackedArray(held.copy())
        slim.digest = self.digest
        return slim


def packed(value: object, *, narrow: bool = False) -> PackedArray | None:
    """Pack a list without loss; None unless it is a non-empty list of integers only or of floats only.

    `narrow` stores small integers as int8.
    """
    numbers = exact_array(value, narrow=narrow) if type(value) is list and value else None
    return None if numbers is None else PackedArray(numbers)


def exact_array(value: list, *, narrow: bool) -> np.ndarray | None:
    """Convert a list to an array without loss, in the narrowest type; None unless it has only integers or only floats.

    `narrow` permits int8.
    """
    kinds = set(map(type, value))
    if kinds == {int}:
        for code in ("b", "i", "q") if narrow else ("i", "q"):
            try:
                return np.frombuffer(array(code, value), dtype=_NARROW[code])
            except OverflowError:
                continue
        return None
    return exact_floats(np.frombuffer(array("d", value))) if kinds == {float} else None


def grown(column: PackedArray | list[float], more: np.ndarray) -> PackedArray | list[float]:
    """Return a column followed by `more`: packed, unless the column cannot be packed together with it."""
    if not len(column):
        return PackedArray(more)
    held = column if isinstance(column, PackedArray) else packed(list(column), narrow=more.dtype == np.int8)
    if held is None or held.array.dtype.kind != more.dtype.kind:
        return [*(column.tolist() if isinstance(column, PackedArray) else column), *more.tolist()]
    return held.grown(more)


def same_numbers(left: object, right: object) -> bool:
    """Compare two columns, at least one of them packed, as lists; NaN equals NaN."""
    if left is right:
        return True
    one, two = (value if isinstance(value, PackedArray) else packed(value) for value in (left, right))
    if one is not None and two is not None:
        return np.array_equal(one.array, two.array, equal_nan=one.array.dtype.kind == two.array.dtype.kind == "f")
    for column, other in ((left, right), (right, left)):
        if isinstance(column, PackedArray):
            return np.array_equal(column.array, other) if isinstance(other, np.ndarray) else column.tolist() == other
    return False


def exact_floats(wide: np.ndarray) -> np.ndarray:
    """Return float64 numbers as float32 where that is exact."""
    with np.errstate(over="ignore", invalid="ignore"):
        slim = wide.astype(np.float32)
    if bool((slim == wide).all()) or np.array_equal(slim, wide, equal_nan=True):
        return slim
    return wide


def exact_ints(wide: np.ndarray) -> np.ndarray:
    """Return integers as int32 if all fit, else as int64."""
    if wide.dtype == np.int32 or not len(wide):
        return wide.astype(np.int32, copy=False)
    fits = np.iinfo(np.int32).min <= wide.min() and wide.max() <= np.iinfo(np.int32).max
    return wide.astype(np.int32 if fits else np.int64)


def constant_mask(value: int, count: int) -> np.ndarray:
    """Return a constant loss mask that takes no memory."""
    return _repeated(np.int8(value), count)


class ColumnOwner:
    """Base class of objects with columns; records, outside of `__dict__`, which columns were read as lists."""

    __slots__ = ("_handed_out",)
    _handed_out: set[str]

    def handed_out(self) -> set[str]:
        """Names of the columns whose list a caller may hold."""
        try:
            return self._handed_out
        except AttributeError:
            self._handed_out = set()
            return self._handed_out

    def grow(self, name: str, column: PackedArray | list[float], more: np.ndarray) -> None:
        """Append `more` to the current column, in place if it is a list that a caller may hold."""
        if type(column) is list and name in self.handed_out():
            column.extend(more.tolist())
        else:
            self.__dict__[name] = grown(column, more)


class Column:
    """Descriptor of a column attribute: reads return a list, storage is packed or a list."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, sample: ColumnOwner | None, owner: type) -> object:
        if sample is None:
            return None  # the default value, which a dataclass keeps as a class attribute
        try:
            value = sample.__dict__[self._name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}") from None
        if type(value) is PackedArray:
            value = sample.__dict__[self._name] = value.tolist()
        if type(value) is list:
            sample.handed_out().add(self._name)
        return value

    def __set__(self, sample: ColumnOwner, value: object) -> None:
        if value is not sample.__dict__.get(self._name):
            sample.handed_out().discard(self._name)
        sample.__dict__[self._name] = value

    def __delete__(self, sample: ColumnOwner) -> None:
        del sample.__dict__[self._name]


def _repeated(value: np.generic, count: int) -> np.ndarray:
    return np.broadcast_to(value, (count,))


def is_constant(numbers: np.ndarray) -> bool:
    """True if one stored number is broadcast to the whole array; such memory is not writable."""
    return len(numbers) > 0 and numbers.strides == (0,)
