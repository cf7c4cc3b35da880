"""Python's garbage collector, where it is in the way.

In processes that hold very many objects it looks through all of them whenever enough new ones have survived, with
everything else standing still: 0.3 s in a driver that has torch and a tokenizer loaded, in the middle of the answers of
a rollout. And it comes between the threads of a compiler.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTS_WITHIN_CALLS = sys.version_info < (3, 12)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the cyclic garbage collector, which would look through all samples again and again while columns are made
    of them (a quarter of the time), and find nothing: no cycles are made meanwhile. Nor does it look through what was
    made right afterwards: it counts as old then."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not _somebody_froze():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """What was loaded before the body is not looked through while it lasts: modules, tokenizers, the parts of a run.

    Garbage among it goes first. Somebody who has frozen what is his keeps it so, and then what is ours stays with it.
    """
    if _kept:
        yield
        return
    is_ours = not _somebody_froze()
    gc.collect()
    gc.freeze()
    _kept.append(True)
    try:
        yield
    finally:
        _kept.pop()
        if is_ours:
            gc.unfreeze()


_kept: list[bool] = []
"""Not empty within the body of `old_objects_left_alone`. The collector can tell, but counts what it keeps one by one:
tens of milliseconds with torch and a tokenizer loaded, twice in every step."""

_before_us = gc.get_freeze_count()
"""What is frozen where nobody of ours or of those who came later froze anything: Python 3.12 itself begins with 375."""


def _somebody_froze() -> bool:
    """Whether there is something that the collector is to leave alone, of ours or of others."""
    return bool(_kept) or gc.get_freeze_count() > _before_us


class _Rest:
    """The collector of the process, and who wants it to rest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_on = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_on:
                gc.enable()


_rest = _Rest()


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """No collection in any thread, until the last who is in here has left: for compilers of several threads.

    Before Python 3.12 a collection can begin within `ast.parse`. Python code that it calls, a destructor's, say, lets
    other threads in, and if one of those parses too, the first ends with "SystemError: AST constructor recursion depth
    mismatch". Triton's compiler parses all the time. Newer Pythons collect between instructions only.
    """
    if not COLLECTS_WITHIN_CALLS:
        yield
        return
    _rest.begin()
    try:
        yield
    finally:
        _rest.end()
