"""Compilers of several threads, and Python's garbage collector.

Before Python 3.12 a collection can begin within `ast.parse`. Python code that it calls, a destructor's, say, lets other
threads in, and if one of those parses too, the first ends with "SystemError: AST constructor recursion depth
mismatch". Triton's compiler parses all the time.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTS_WITHIN_CALLS = sys.version_info < (3, 12)


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
    """No collection in any thread, where one could break a compiler, until the last who is in here has left."""
    if not COLLECTS_WITHIN_CALLS:
        yield
        return
    _rest.begin()
    try:
        yield
    finally:
        _rest.end()
