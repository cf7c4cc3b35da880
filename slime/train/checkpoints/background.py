"""A checkpoint that is written while training goes on (`--async-save`).

Invariant: what is written is what the weights were when the save began: a copy on the host. It is named as the latest
only when the parts of all ranks are whole, by the same steps as any other; until then the one before it counts. One
save at a time. The thread that writes has a process group of its own, so it never meets the collectives of training,
and no deadline: whoever waits for it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from slime.train.checkpoints.draft import Draft, begin, commit
from slime.train.topology import Ranks

LOOK_AGAIN_S = 0.5
NO_DEADLINE = timedelta(days=30)


class BackgroundSave:
    """Made on all ranks together, once; all of them call each method together."""

    def __init__(self, world: Ranks) -> None:
        self._world = world
        group = dist.new_group(backend="gloo", timeout=NO_DEADLINE) if world.size > 1 else None
        self._ranks = Ranks(world.rank, world.size, torch.device("cpu"), group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[Path] | None = None
        self._added = 0

    def start(self, drafts: Sequence[Draft], *, keep_count: int | None) -> None:
        """Copy what is to be saved, and return; a place that cannot be written at all is a `NotWritten` now."""
        assert self._saving is None, "the save before it was not finished"
        begin(drafts, self._world)
        for draft in drafts:
            draft.take_copies()
        self._added = 0
        self._saving = self._thread.submit(commit, drafts, self._ranks, keep_count=keep_count, added=self._count)

    def finish(self, *, patient: bool, tick: Callable[[int], None] = lambda _: None) -> Path | None:
        """The checkpoint that was begun, when it is whole, once; None while it is not, or there is none.

        With `patient` it is waited for, and `tick` hears of the tensors that were written meanwhile. A `NotWritten` is
        raised on all ranks; the weights are still there.
        """
        if self._saving is None:
            return None
        told = self._added
        while patient and not self._saving.done():
            wait([self._saving], timeout=LOOK_AGAIN_S)
            if self._added > told:
                tick(self._added - told)
                told = self._added
        busy = torch.tensor([0.0 if self._saving.done() else 1.0], device=self._world.device)
        if self._world.max(busy).item():
            return None
        saving, self._saving = self._saving, None
        return saving.result()

    def _count(self, _: str) -> None:
        self._added += 1
