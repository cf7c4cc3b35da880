"""Pauses Python's garbage collector and freezes old objects.

A full collection traverses all objects of the process while all threads are stopped: 0.3 s in a driver that has torch
and a tokenizer loaded, in the middle of a rollout's responses. It also breaks compilers that run in several threads.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTS_WITHIN_CALLS = sys.version_info < (3, 12)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector while the body runs, for code that creates many objects and no cycles.

    Otherwise it would traverse all samples repeatedly while columns are made of them (a quarter of the time). Objects
    created in the body count as old afterwards, so the next collection skips them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not _has_frozen_objects():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude the objects that exist now (modules, tokenizers, run components) from collections while the body runs.

    Garbage is collected first. If other code has frozen objects, they stay frozen, and ours stay frozen with them.
    """
    if _frozen_bodies:
        yield
        return
    is_ours = not _has_frozen_objects()
    gc.collect()
    gc.freeze()
    _frozen_bodies.append(True)
    try:
        yield
    finally:
        _frozen_bodies.pop()
        if is_ours:
            gc.unfreeze()


_frozen_bodies: list[bool] = []
"""Not empty within the body of `gc_frozen`. `gc.get_freeze_count` also tells, but counts object by object:
tens of milliseconds with torch and a tokenizer loaded, twice in every step."""

_frozen_at_import = gc.get_freeze_count()
"""The number of objects frozen at import; Python 3.12 itself starts with 375."""


def _has_frozen_objects() -> bool:
    """Return True if this module or other code has frozen objects."""
    return bool(_frozen_bodies) or gc.get_freeze_count() > _frozen_at_import


_pause_lock = threading.Lock()
_pauses: list[bool] = []
"""For each body of `gc_disabled_in_all_threads` that runs, whether collection was on before the first one."""


@contextmanager
def gc_disabled_in_all_threads() -> Iterator[None]:
    """Disable collection in all threads until the last body has ended: for compilers that run in several threads.

    Before Python 3.12 a collection can start within `ast.parse`. If it runs Python code, such as a destructor, other
    threads can run, and if one of them parses too, the first fails with "SystemError: AST constructor recursion depth
    mismatch". Triton's compiler parses all the time. Newer Pythons collect only between instructions.
    """
    if not COLLECTS_WITHIN_CALLS:
        yield
        return
    with _pause_lock:
        _pauses.append(_pauses[0] if _pauses else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _pause_lock:
            was_on = _pauses.pop()
            if was_on and not _pauses:
                gc.enable()
