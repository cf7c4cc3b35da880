"""Arrays in shared memory: written once, read by other processes of the machine by file and offset.

Invariants: a stored array is never moved. A file stays while any array that `keep` returned from it is alive, and is
deleted with the last one. An array is shared by its place only if it is the whole stored array, contiguous; any other
is written to a file that lives until the readers are done. Readers map pages copy-on-write, so their changes are
private. Files are in a folder that is locked while the run lives; the next run to start removes the files of a killed
one.
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
from typing import TypedDict

import numpy as np

from slime.cluster.devices import cpu_cores
from slime.cluster.memory.staging import SHARED_MEMORY, StagingFolder, remove_stale
from slime.cluster.rpc.messages import DamagedMessage, Piece, batch_pieces, remaining_pieces

SMALLEST = 32 * 2**20
"""Minimum size of a file in bytes, if there is room. Only its used part takes memory."""
LIVE_FILES = 16
"""A new file has 1/LIVE_FILES of the size of all kept files: there are few files, and nearly empty ones hold little."""
RESERVE = 2
"""The arena uses at most 1/RESERVE of the available shared memory: weights in transit need some too."""
_BITS = 40
"""The low bits of a place are the byte offset; the others are the file number."""
_FIRST_TEMPORARY = 1 << 22
"""First number of the files that are written for one step; the number before it is "no file", for empty arrays."""
_NO_ARENA_FILE = _FIRST_TEMPORARY - 1
_ALIGNED = 64
_GAP = bytes(_ALIGNED)


class SharedMemoryFull(Exception):
    """Raised when shared memory has no room; the message says why."""


class _ArenaFile:
    """A file in shared memory that is filled from the start."""

    __slots__ = ("__weakref__", "address", "end", "fd", "mapped", "number", "size")

    def __init__(self, path: Path, number: int, size: int) -> None:
        self.fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.ftruncate(self.fd, size)
        self.mapped = mmap.mmap(self.fd, size)
        self.address = np.frombuffer(self.mapped, np.uint8).ctypes.data
        self.number, self.size, self.end = number, size, 0


class _KeptBase:
    """The base object of a kept array: its place, and a reference that keeps the file alive.

    Views of the array have the array as their base, so an array with this base is the whole stored array.
    """

    __slots__ = ("__array_interface__", "file", "place")

    def __init__(self, file: _ArenaFile, begin: int, array: np.ndarray) -> None:
        self.file, self.place = file, _encode_place(file.number, begin)
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (file.address + begin, False),
        }


class PlacesMessage(TypedDict):
    """Some of `Places` in the form that is sent to a reader."""

    paths: dict[int, str]
    places: np.ndarray


@dataclass(frozen=True)
class Places:
    """The locations of arrays: each place is a file number (a key of `paths`) and a byte offset in that file."""

    paths: dict[int, str]
    places: np.ndarray

    def part(self, begin: int, end: int) -> PlacesMessage:
        """Return the places `begin` to `end` as a message."""
        own = self.places[begin:end]
        numbers = set((own >> _BITS).tolist()) - {_NO_ARENA_FILE}
        return {"paths": {number: self.paths[number] for number in sorted(numbers)}, "places": own}


class SharedArena:
    """Keeps arrays in files under `root`. Thread-safe."""

    def __init__(self, root: Path = SHARED_MEMORY) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._staging: StagingFolder | None = None
        self._is_closed = False
        self._open: _ArenaFile | None = None
        self._made = 0
        self._alive: dict[int, tuple[Path, int]] = {}

    def clean(self) -> None:
        """Remove the files of killed runs."""
        remove_stale(self.root)

    def keep(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copy arrays to shared memory and return the copies (after `close`: the arrays); raises `SharedMemoryFull`."""
        begins, needed = _layout([array.nbytes for array in arrays])
        with self._lock:
            if not needed or self._is_closed:
                return list(arrays)
            try:
                file = self._file_for(needed)
                _write(file.fd, _padded_bytes(arrays), file.end)
            except OSError as error:
                raise SharedMemoryFull(f"{self.root} cannot be written ({error})") from error
            begin = file.end
            file.end += needed
        return [np.asarray(_KeptBase(file, begin + own, array)) for own, array in zip(begins, arrays, strict=True)]

    @contextmanager
    def publish_arrays(self, arrays: Sequence[np.ndarray]) -> Iterator[Places]:
        """Make arrays readable by other processes while the body runs; yield their places.

        Arrays that are not kept here are written first, by one thread per core. After a `SharedMemoryFull` no file is
        left.
        """
        bases = [array.base for array in arrays]
        places = np.array([base.place if type(base) is _KeptBase else -1 for base in bases], np.int64)
        strays = [place for place in np.flatnonzero(places < 0).tolist() if arrays[place].size]
        with ExitStack() as stack:
            paths = {number: str(self._alive[number][0]) for number in np.unique(places[places >= 0] >> _BITS).tolist()}
            if strays:
                files, places[strays] = self._written(stack, [arrays[place] for place in strays])
                paths |= files
            places[places < 0] = _NO_ARENA_FILE << _BITS
            yield Places(paths, places)

    def close(self) -> None:
        """Remove the folder; arrays that are still referenced in this process stay readable here."""
        with self._lock:
            self._is_closed = True
            self._open = None
            if self._staging is not None:
                self._staging.close()

    def _file_for(self, needed: int) -> _ArenaFile:
        if self._open is None or self._open.end + needed > self._open.size:
            self._open = None  # this deletes the file if no array in it is referenced
            kept, free = sum(size for _, size in list(self._alive.values())), shutil.disk_usage(self.root).free
            allowed = (kept + free) // RESERVE
            if kept + needed > allowed:
                raise SharedMemoryFull(f"{self.root} has {_gib(free)} free, and {_gib(kept)} are kept there already")
            usual = max(min(SMALLEST, allowed // LIVE_FILES), kept // LIVE_FILES)
            size = max(needed, min(usual, allowed - kept))
            if self._staging is None:
                self._staging = StagingFolder(self.root, "shares")
            path = self._staging.path / f"kept-{self._made}"
            self._open = file = _ArenaFile(path, self._made, size)
            self._alive[self._made] = path, size
            weakref.finalize(file, _delete_file, self._alive, self._made, file.fd).atexit = False
            self._made += 1
        return self._open

    def _written(self, stack: ExitStack, arrays: Sequence[np.ndarray]) -> tuple[dict[int, str], list[int]]:
        """Write arrays to files that are removed with `stack`; return the paths by number and each array's place."""
        try:
            staging = stack.enter_context(StagingFolder(self.root, "shares"))
        except OSError as error:
            raise SharedMemoryFull(f"{self.root} cannot be written ({error})") from error
        ends, threads = np.cumsum([array.nbytes for array in arrays]), cpu_cores()  # parts of about the same size
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, threads) / threads, side="right").tolist()
        parts = [range(begin, end) for begin, end in pairwise(sorted({0, *cuts, len(arrays)}))]
        layouts = [_layout([arrays[place].nbytes for place in part]) for part in parts]
        needed, free = sum(size for _, size in layouts), shutil.disk_usage(self.root).free
        if needed > free:
            raise SharedMemoryFull(f"{self.root} has {_gib(free)} free and {_gib(needed)} are needed")
        paths = {_FIRST_TEMPORARY + number: staging.path / f"{number}" for number in range(len(parts))}
        with ThreadPoolExecutor(len(parts), thread_name_prefix="share") as pool:
            writing = [
                pool.submit(_write_file, path, [arrays[place] for place in part])
                for path, part in zip(paths.values(), parts, strict=True)
            ]
            try:
                for one in writing:
                    one.result()
            except OSError as error:  # another process took the space
                raise SharedMemoryFull(f"{self.root} has no room for {_gib(needed)} ({error})") from error
        placed = zip(paths, layouts, strict=True)
        places = [_encode_place(number, begin) for number, (begins, _) in placed for begin in begins]
        return {number: str(path) for number, path in paths.items()}, places


def read_places(message: PlacesMessage, sizes: Sequence[int]) -> list[np.ndarray]:
    """Map the arrays of `Places.part` as bytes; a mapping lives while one of its arrays is referenced."""
    places, size = message["places"], np.array(sizes, np.int64)
    number, begin = places >> _BITS, places & (1 << _BITS) - 1
    found: list[np.ndarray] = [np.empty(0, np.uint8)] * len(places)
    for key, path in message["paths"].items():
        own = np.flatnonzero((number == key) & (size > 0))
        if not len(own):
            continue
        first = int(begin[own].min()) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        end = int((begin + size)[own].max())
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size < end:
                    raise DamagedMessage(f"{path} ends before byte {end}: it is incomplete")
                pages = mmap.mmap(file.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first)
        except OSError as error:
            raise DamagedMessage(f"{path} cannot be read: {error}") from error
        mapped = np.frombuffer(pages, np.uint8)
        for place, at, count in zip(own.tolist(), (begin[own] - first).tolist(), size[own].tolist(), strict=True):
            found[place] = mapped[at : at + count]
    return found


def _encode_place(number: int, begin: int) -> int:
    return number << _BITS | begin


def _delete_file(alive: dict[int, tuple[Path, int]], number: int, fd: int) -> None:
    """Close and delete a file when no array in it is referenced."""
    os.close(fd)
    alive.pop(number)[0].unlink(missing_ok=True)


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of consecutive aligned arrays of these sizes, and the end of the last one."""
    *begins, end = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
    return begins, end


def _write_file(path: Path, arrays: Sequence[np.ndarray]) -> None:
    """Write arrays to a new file; other threads can run while bytes are copied."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        _write(fd, _padded_bytes(arrays), 0)
    finally:
        os.close(fd)


def _padded_bytes(arrays: Sequence[np.ndarray]) -> Iterator[Piece]:
    """Yield the bytes of arrays, each padded to the alignment of any number type."""
    for array in arrays:
        if array.nbytes:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            if gap := -array.nbytes % _ALIGNED:
                yield _GAP[:gap]


def _write(fd: int, pieces: Iterator[Piece], begin: int) -> None:
    for some in batch_pieces(pieces):
        while some:
            written = os.pwritev(fd, some, begin)  # may write less than all: at most 2 GiB
            begin += written
            some = remaining_pieces(some, written)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
