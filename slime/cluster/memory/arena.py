"""Arrays in shared memory: put there once, read by other processes of the machine at the places they are told.

Invariants: what was put is never moved. It stays for as long as somebody holds one of the arrays that `keep` gave back;
with the last one of a file the file is gone. An array is handed over as a place only if it is the whole of what was put
there, contiguous; any other is written into a file that lives until the readers are done. Whoever reads has copies of
the pages that he changes, and nobody else sees it. Files are in a folder that is locked while the run lives: what a
killed run left is removed by the next one that starts.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from slime.cluster.devices import cpu_cores
from slime.cluster.memory.staging import SHARED_MEMORY, StagingFolder, remove_stale
from slime.cluster.rpc.messages import DamagedMessage, Piece, rest_of, some_at_a_time

SMALLEST = 32 * 2**20
"""Bytes of a file, where there is room. Only what is used of it takes memory."""
LIVE_FILES = 16
"""A file is as large as this part of all that is kept: there are few files, and little is held by those that are
nearly empty."""
RESERVE = 2
"""Of so many parts of the shared memory that could be had one is taken: others need some, for weights on their way."""
_BITS = 40
"""Of a place that say which byte; the others, which file."""
_WRITTEN = 1 << 22
"""The numbers of files that are written for one step begin here; that of no file, for what is empty, is before it."""
_NOWHERE = _WRITTEN - 1
_ALIGNED = 64
_GAP = bytes(_ALIGNED)


class NoRoom(Exception):
    """Shared memory cannot take it; the words say why."""


class _File:
    """A file in shared memory that is filled from its beginning."""

    __slots__ = ("__weakref__", "address", "end", "fd", "mapped", "number", "size")

    def __init__(self, path: Path, number: int, size: int) -> None:
        self.fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.ftruncate(self.fd, size)
        self.mapped = mmap.mmap(self.fd, size)
        self.address = np.frombuffer(self.mapped, np.uint8).ctypes.data
        self.number, self.size, self.end = number, size, 0


class _Kept:
    """What a kept array is based on: its place, and the file that lives as long as it does.

    Views of the array are based on the array: what is based on this is the whole of it.
    """

    __slots__ = ("__array_interface__", "file", "place")

    def __init__(self, file: _File, begin: int, array: np.ndarray) -> None:
        self.file, self.place = file, _place(file.number, begin)
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (file.address + begin, False),
        }


@dataclass(frozen=True)
class Places:
    """Where arrays are: each place is the number of a file, a key of `paths`, and a byte of it."""

    paths: dict[int, str]
    places: np.ndarray

    def part(self, begin: int, end: int) -> dict[str, Any]:
        """Some of them in a row, as a message."""
        own = self.places[begin:end]
        numbers = set((own >> _BITS).tolist()) - {_NOWHERE}
        return {"paths": {number: self.paths[number] for number in sorted(numbers)}, "places": own}


class SharedArena:
    """Keeps arrays in files under `root`; several threads may use it."""

    def __init__(self, root: Path = SHARED_MEMORY) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._staging: StagingFolder | None = None
        self._is_closed = False
        self._open: _File | None = None
        self._made = 0
        self._alive: dict[int, tuple[Path, int]] = {}

    def clean(self) -> None:
        """Remove what killed runs left behind."""
        remove_stale(self.root)

    def keep(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The same arrays in shared memory, or as they are once this is closed; a `NoRoom` where there is none."""
        begins, needed = _layout([array.nbytes for array in arrays])
        with self._lock:
            if not needed or self._is_closed:
                return list(arrays)
            try:
                file = self._file_for(needed)
                _write(file.fd, _with_gaps(arrays), file.end)
            except OSError as error:
                raise NoRoom(f"{self.root} cannot be written ({error})") from error
            begin = file.end
            file.end += needed
        return [np.asarray(_Kept(file, begin + own, array)) for own, array in zip(begins, arrays, strict=True)]

    @contextmanager
    def lent(self, arrays: Sequence[np.ndarray]) -> Iterator[Places]:
        """Where arrays are to be read, for as long as this lasts: those that are not kept here are written first, by as
        many threads as there are cores. A `NoRoom` leaves nothing behind."""
        bases = [array.base for array in arrays]
        places = np.array([base.place if type(base) is _Kept else -1 for base in bases], np.int64)
        strays = [place for place in np.flatnonzero(places < 0).tolist() if arrays[place].size]
        with ExitStack() as stack:
            paths = {number: str(self._alive[number][0]) for number in np.unique(places[places >= 0] >> _BITS).tolist()}
            if strays:
                files, places[strays] = self._written(stack, [arrays[place] for place in strays])
                paths |= files
            places[places < 0] = _NOWHERE << _BITS
            yield Places(paths, places)

    def close(self) -> None:
        """Remove the folder; arrays that somebody holds stay readable here."""
        with self._lock:
            self._is_closed = True
            self._open = None
            if self._staging is not None:
                self._staging.close()

    def _file_for(self, needed: int) -> _File:
        if self._open is None or self._open.end + needed > self._open.size:
            self._open = None  # with which the file is gone, if nobody holds anything of it
            kept, free = sum(size for _, size in list(self._alive.values())), shutil.disk_usage(self.root).free
            allowed = (kept + free) // RESERVE
            if kept + needed > allowed:
                raise NoRoom(f"{self.root} has {_gib(free)} free, and {_gib(kept)} are kept there already")
            usual = max(min(SMALLEST, allowed // LIVE_FILES), kept // LIVE_FILES)
            size = max(needed, min(usual, allowed - kept))
            if self._staging is None:
                self._staging = StagingFolder(self.root, "shares")
            path = self._staging.path / f"kept-{self._made}"
            self._open = file = _File(path, self._made, size)
            self._alive[self._made] = path, size
            weakref.finalize(file, _forget, self._alive, self._made, file.fd).atexit = False
            self._made += 1
        return self._open

    def _written(self, stack: ExitStack, arrays: Sequence[np.ndarray]) -> tuple[dict[int, str], list[int]]:
        """Files by number with arrays, removed with `stack`, and the place of each array."""
        try:
            staging = stack.enter_context(StagingFolder(self.root, "shares"))
        except OSError as error:
            raise NoRoom(f"{self.root} cannot be written ({error})") from error
        parts = _even_parts([array.nbytes for array in arrays], cpu_cores())
        layouts = [_layout([arrays[place].nbytes for place in part]) for part in parts]
        needed, free = sum(size for _, size in layouts), shutil.disk_usage(self.root).free
        if needed > free:
            raise NoRoom(f"{self.root} has {_gib(free)} free and {_gib(needed)} are needed")
        paths = {_WRITTEN + number: staging.path / f"{number}" for number in range(len(parts))}
        with ThreadPoolExecutor(len(parts), thread_name_prefix="share") as pool:
            writing = [
                pool.submit(_write_file, path, [arrays[place] for place in part])
                for path, part in zip(paths.values(), parts, strict=True)
            ]
            try:
                for one in writing:
                    one.result()
            except OSError as error:  # somebody else took the room
                raise NoRoom(f"{self.root} has no room for {_gib(needed)} ({error})") from error
        placed = zip(paths, layouts, strict=True)
        places = [_place(number, begin) for number, (begins, _) in placed for begin in begins]
        return {number: str(path) for number, path in paths.items()}, places


def read_places(message: dict[str, Any], sizes: Sequence[int]) -> list[np.ndarray]:
    """The bytes of the arrays of `Places.part`, mapped for as long as somebody holds one of them."""
    places, size = message["places"], np.array(sizes, np.int64)
    number, begin = places >> _BITS, places & (1 << _BITS) - 1
    found: list[np.ndarray] = [np.empty(0, np.uint8)] * len(places)
    for key, path in message["paths"].items():
        own = np.flatnonzero((number == key) & (size > 0))
        if not len(own):
            continue
        first = int(begin[own].min()) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = _mapped(path, first, int((begin + size)[own].max()))
        for place, at, count in zip(own.tolist(), (begin[own] - first).tolist(), size[own].tolist(), strict=True):
            found[place] = mapped[at : at + count]
    return found


def _place(number: int, begin: int) -> int:
    return number << _BITS | begin


def _mapped(path: str, begin: int, end: int) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < end:
                raise DamagedMessage(f"{path} ends before byte {end}: it is not whole")
            return np.frombuffer(mmap.mmap(file.fileno(), end - begin, access=mmap.ACCESS_COPY, offset=begin), np.uint8)
    except OSError as error:
        raise DamagedMessage(f"{path} cannot be read: {error}") from error


def _forget(alive: dict[int, tuple[Path, int]], number: int, fd: int) -> None:
    """A file of which nobody holds an array any more."""
    os.close(fd)
    alive.pop(number)[0].unlink(missing_ok=True)


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where arrays of these sizes begin, one behind the other, and where the last one ends."""
    *begins, end = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
    return begins, end


def _even_parts(sizes: Sequence[int], count: int) -> list[range]:
    """Neighbours together, in at most `count` parts of about the same size."""
    ends = np.cumsum(sizes)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count, side="right").tolist()
    bounds = sorted({0, *cuts, len(sizes)})
    return [range(begin, end) for begin, end in pairwise(bounds)]


def _write_file(path: Path, arrays: Sequence[np.ndarray]) -> None:
    """The interpreter is free for other threads while bytes are copied."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        _write(fd, _with_gaps(arrays), 0)
    finally:
        os.close(fd)


def _with_gaps(arrays: Sequence[np.ndarray]) -> Iterator[Piece]:
    """The bytes of arrays, each up to a place that suits any type of number."""
    for array in arrays:
        if array.nbytes:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            if gap := -array.nbytes % _ALIGNED:
                yield _GAP[:gap]


def _write(fd: int, pieces: Iterator[Piece], begin: int) -> None:
    for some in some_at_a_time(pieces):
        while some:
            written = os.pwritev(fd, some, begin)  # perhaps not all of it: two GiB at most
            begin += written
            some = rest_of(some, written)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
