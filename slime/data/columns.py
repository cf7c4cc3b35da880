"""A column of a sample: numbers in an array, which plugins see as a list.

Invariants: reading the attribute gives a list, and that list is the column until the sample is compacted again: what is
written into it counts, and an append makes it longer. A list that was set and never read since may be somebody else's
too, so an append leaves it as it is. Packing loses nothing: ids are int32 (int64 where that is too small), log-probs
float32 wherever that is exact and float64 elsewhere, and a list with anything but whole numbers or floats in it stays a
list. What was packed is never written into, so copies of a sample share it.
"""

from __future__ import annotations

import threading
from array import array
from typing import Any

import numpy as np

_NARROW = {"b": np.int8, "i": np.int32, "q": np.int64}


class _Buffer:
    """Memory with room behind what is used; whoever holds the last entry may claim more of it."""

    __slots__ = ("_lock", "array", "used")

    def __init__(self, content: np.ndarray, used: int) -> None:
        self.array = content
        self.used = used
        self._lock = threading.Lock()

    def claim(self, end: int, count: int) -> bool:
        """Whether the `count` places behind `end` now belong to the caller."""
        with self._lock:
            if self.used != end or end + count > len(self.array):
                return False
            self.used += count
            return True


class Packed:
    """Numbers that are only ever read; appending gives a longer one, at a cost of what is appended."""

    __slots__ = ("_buffer", "array", "digest", "high", "is_finite", "length", "low", "total")

    def __init__(self, content: np.ndarray | _Buffer, length: int | None = None) -> None:
        self._buffer = content if isinstance(content, _Buffer) else _Buffer(content, len(content))
        self.length = self._buffer.used if length is None else length
        self.array = self._buffer.array[: self.length]
        """The numbers, not to be written."""
        self.array.setflags(write=False)
        self.low: int | None = None
        self.high: int | None = None
        """The least and the largest of whole numbers, once they were looked at."""
        self.total: int | None = None
        """The sum of whole numbers of a byte each, once they were looked at."""
        self.is_finite: bool | None = None
        """Whether all floats are numbers, once they were looked at."""
        self.digest: bytes | None = None
        """What tells them from other numbers, once somebody asked."""

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"<{self.length} packed {self.array.dtype}>"

    def __deepcopy__(self, _memo: dict[int, Any]) -> Packed:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, (np.ascontiguousarray(self.array),)

    def look(self) -> None:
        """Find out what is asked of a column, once: numbers that are packed do not change."""
        held = self.array
        if held.dtype.kind == "f" and self.is_finite is None:
            self.is_finite = bool(np.isfinite(held).all())
        elif held.dtype.kind == "i" and self.low is None and len(held):
            self.low, self.high = (int(held[0]),) * 2 if is_constant(held) else (int(held.min()), int(held.max()))
            if held.dtype == np.int8:
                self.total = self.low * len(held) if is_constant(held) else int(held.sum())

    def moved(self, same: np.ndarray) -> Packed:
        """These numbers in other memory, `same`, with all that is known of them."""
        twin = Packed(same)
        twin.array = same  # itself: what it is based on says where it is
        same.setflags(write=False)
        twin.low, twin.high, twin.total, twin.is_finite = self.low, self.high, self.total, self.is_finite
        twin.digest = self.digest
        return twin

    def tolist(self) -> list[Any]:
        """The numbers as a new list."""
        return self._buffer.array[: self.length].tolist()

    def grown(self, more: np.ndarray) -> Packed:
        """These numbers and `more`; this one stays as it is."""
        if not len(more):
            return self
        mine = self._buffer.array
        if is_constant(mine) and is_constant(more) and mine[0] == more[0]:
            return Packed(_repeated(mine[0], self.length + len(more)))
        kind, end = np.promote_types(mine.dtype, more.dtype), self.length + len(more)
        if kind == mine.dtype and not is_constant(mine) and self._buffer.claim(self.length, len(more)):
            mine[self.length : end] = more
            return Packed(self._buffer, end)
        room = np.empty(end + end // 2, dtype=kind)
        room[: self.length] = mine[: self.length]
        room[self.length : end] = more
        return Packed(_Buffer(room, end), end)

    def compacted(self) -> Packed:
        """The same numbers without room behind them; ones that are all equal take no memory."""
        held = self.array
        if is_constant(held):
            return self
        if held.dtype == np.int8 and len(held) and (held == held[0]).all():
            slim = Packed(_repeated(held[0], len(held)))
        elif len(held) == len(self._buffer.array):
            return self
        else:
            slim = Packed(held.copy())
        slim.digest = self.digest
        return slim


def packed(value: Any, *, narrow: bool = False) -> Packed | None:
    """A list as a column, exactly; None when it is no list of whole numbers alone or floats alone, or empty.

    `narrow` takes a byte for small whole numbers.
    """
    if type(value) is not list or not value:
        return None
    kinds = set(map(type, value))
    if kinds == {int}:
        return _packed_ints(value, narrow)
    return Packed(exact_floats(np.frombuffer(array("d", value)))) if kinds == {float} else None


def grown(column: Packed | list[Any], more: np.ndarray) -> Packed | list[Any]:
    """A column and `more` behind it: packed, unless what is there cannot be packed beside it."""
    if not len(column):
        return Packed(more)
    held = column if isinstance(column, Packed) else packed(list(column), narrow=more.dtype == np.int8)
    if held is None or held.array.dtype.kind != more.dtype.kind:
        return [*(column.tolist() if isinstance(column, Packed) else column), *more.tolist()]
    return held.grown(more)


def same_numbers(left: Any, right: Any) -> bool:
    """Whether two columns, one of them packed at least, are equal lists; here NaN equals NaN."""
    if left is right:
        return True
    one, two = (value if isinstance(value, Packed) else packed(value) for value in (left, right))
    if one is None or two is None:
        one, other = (left, right) if isinstance(left, Packed) else (right, left)
        return np.array_equal(one.array, other) if isinstance(other, np.ndarray) else one.tolist() == other
    return np.array_equal(one.array, two.array, equal_nan=one.array.dtype.kind == two.array.dtype.kind == "f")


def exact_floats(wide: np.ndarray) -> np.ndarray:
    """float64 as float32 where that loses nothing."""
    with np.errstate(over="ignore", invalid="ignore"):
        slim = wide.astype(np.float32)
    if bool((slim == wide).all()) or np.array_equal(slim, wide, equal_nan=True):
        return slim
    return wide


def exact_ints(wide: np.ndarray) -> np.ndarray:
    """Whole numbers as int32 where they fit."""
    if wide.dtype == np.int32 or not len(wide):
        return wide.astype(np.int32, copy=False)
    fits = np.iinfo(np.int32).min <= wide.min() and wide.max() <= np.iinfo(np.int32).max
    return wide.astype(np.int32 if fits else np.int64)


def mask_of(value: int, count: int) -> np.ndarray:
    """A loss mask of one value, in no memory."""
    return _repeated(np.int8(value), count)


class HandsOutLists:
    """What has columns, and remembers which of them somebody has read as a list: outside of its `__dict__`."""

    __slots__ = ("_handed_out",)
    _handed_out: set[str]

    def handed_out(self) -> set[str]:
        """Names of the columns whose list somebody may hold."""
        try:
            return self._handed_out
        except AttributeError:
            self._handed_out = set()
            return self._handed_out

    def grow(self, name: str, column: Packed | list[Any], more: np.ndarray) -> None:
        """Put `more` behind what is the column now: into the list itself if somebody may hold it."""
        if type(column) is list and name in self.handed_out():
            column.extend(more.tolist())
        else:
            self.__dict__[name] = grown(column, more)


class Column:
    """The attribute of a sample: a list for whoever reads it, packed or not inside."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, sample: Any, owner: type) -> Any:
        if sample is None:
            return None  # the default, as a dataclass has it on its class
        try:
            value = sample.__dict__[self._name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}") from None
        if type(value) is Packed:
            value = sample.__dict__[self._name] = value.tolist()
        if type(value) is list:
            sample.handed_out().add(self._name)
        return value

    def __set__(self, sample: Any, value: Any) -> None:
        if value is not sample.__dict__.get(self._name):
            sample.handed_out().discard(self._name)
        sample.__dict__[self._name] = value

    def __delete__(self, sample: Any) -> None:
        del sample.__dict__[self._name]


def _packed_ints(value: list[int], narrow: bool) -> Packed | None:
    for code in ("b", "i", "q") if narrow else ("i", "q"):
        try:
            return Packed(np.frombuffer(array(code, value), dtype=_NARROW[code]))
        except OverflowError:
            continue
    return None


def _repeated(value: Any, count: int) -> np.ndarray:
    return np.broadcast_to(value, (count,))


def is_constant(numbers: np.ndarray) -> bool:
    """Whether one number stands for all; such memory cannot be written into."""
    return len(numbers) > 0 and numbers.strides == (0,)
