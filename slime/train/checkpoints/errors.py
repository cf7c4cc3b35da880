"""Recoverable write failures of trainers.

Invariant: if one rank cannot write, all ranks first run the collectives of the whole operation and then raise
`NotWritten` together, so that they are in step for the next call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from safetensors import SafetensorError

from slime.errors import RunFailed
from slime.storage.files import FolderTaken

T = TypeVar("T")

WRITE_ERRORS = (OSError, SafetensorError, FolderTaken)


class NotWritten(RunFailed):
    """Raised when the disk is full or lost, or a path is already in use; the trainers keep the weights."""


class WritingRanks(Protocol):
    """Ranks that write together and exchange error messages."""

    @property
    def rank(self) -> int: ...

    def union(self, names: Iterable[str]) -> set[str]: ...


def run_together(ranks: WritingRanks, write: Callable[[], T] | None, what: str) -> T | None:
    """Run `write` on ranks that have one and return its result; if any rank fails, all raise the same `NotWritten`."""
    problem, result = None, None
    if write is not None:
        try:
            result = write()
        except WRITE_ERRORS as error:
            problem = str(error)
            if isinstance(error, OSError) and error.strerror is not None:
                named = isinstance(error.filename, str | os.PathLike)
                problem = error.strerror + (f" ({os.fspath(error.filename)})" if named else "")
    problems = ranks.union([problem] if problem is not None else [])
    if problems:
        raise NotWritten(f"cannot write {what}: {min(problems)}")
    return result


def write_together(
    ranks: WritingRanks, tensors: Iterator[object], write: Callable[[Iterator[Any]], T] | None, what: str
) -> T | None:
    """Let `write` consume `tensors` on the rank that has it, and return its result; the others iterate without it."""

    def consume() -> T | None:
        try:
            return None if write is None else write(tensors)
        finally:
            for _ in tensors:  # finish the iteration: all ranks take part in gathering each tensor
                pass

    return run_together(ranks, consume, what)
