"""Files of trainers that could not be written, in a way that leaves the trainers usable.

Invariant: when one rank cannot write, all ranks go through the collectives of the whole operation first and then raise
`NotWritten` together, so that the next call finds them in step.
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
    """A full or lost disk, or a path that is taken; the weights are still there."""


class Peers(Protocol):
    """The ranks, as far as they have to agree."""

    def union(self, names: Iterable[str]) -> set[str]: ...


def agreed(ranks: Peers, write: Callable[[], T] | None, what: str) -> T | None:
    """What `write` gives (on ranks that have one) when nobody failed; else all ranks raise the same `NotWritten`."""
    problem, result = None, None
    if write is not None:
        try:
            result = write()
        except WRITE_ERRORS as error:
            problem = _reason(error)
    problems = ranks.union([problem] if problem is not None else [])
    if problems:
        raise NotWritten(f"cannot write {what}: {min(problems)}")
    return result


def written_together(
    ranks: Peers, tensors: Iterator[Any], write: Callable[[Iterator[Any]], Any] | None, what: str
) -> None:
    """Have `write` consume `tensors` (on the rank that has it; the others just go through them)."""

    def consume() -> None:
        try:
            if write is not None:
                write(tensors)
        finally:
            for _ in tensors:  # what is left of them: gathering each takes all ranks
                pass

    agreed(ranks, consume, what)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        where = f" ({os.fspath(error.filename)})" if isinstance(error.filename, str | os.PathLike) else ""
        return error.strerror + where
    return str(error)
