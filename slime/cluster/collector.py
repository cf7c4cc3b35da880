"""Python's garbage collector in processes that hold very many objects.

It looks through all of them whenever enough new ones have survived, with everything else standing still: 0.3 s in a
driver that has torch and a tokenizer loaded, in the middle of the answers of a rollout.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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

    Garbage among it goes first. Somebody who has frozen what is his keeps it so.
    """
    if _somebody_froze():
        yield
        return
    gc.collect()
    gc.freeze()
    _kept.append(True)
    try:
        yield
    finally:
        _kept.pop()
        gc.unfreeze()


_kept: list[bool] = []
"""Not empty within the body of `old_objects_left_alone`. The collector can tell, but counts what it keeps one by one:
tens of milliseconds with torch and a tokenizer loaded, twice in every step."""


def _somebody_froze() -> bool:
    """Whether there is something that the collector is to leave alone, of ours or of others."""
    return bool(_kept) or gc.get_freeze_count() > 0
