"""How tasks of groups end: with a group, with an error, or cancelled; never without a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from slime.rollout.base_types import Group
from slime.rollout.failures import RolloutFailed
from slime.waits import waiting

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 10.0
"""How long a task may take to end once it is cancelled, before it is left behind."""


def result_of(task: asyncio.Task[Group]) -> Group:
    """The group of a task that has ended; nobody here cancels one that is still wanted."""
    if task.cancelled():
        raise RolloutFailed(
            "a group was cancelled from inside: a generate, hook or reward function let a CancelledError out"
        )
    return task.result()


async def cancelled(tasks: Collection[asyncio.Task[Group]]) -> None:
    """Cancel tasks and wait until they have ended; those that do not heed it are left behind."""
    done, late = {task for task in tasks if task.done()}, {task for task in tasks if not task.done()}
    for task in late:
        task.cancel()
    if late:
        with waiting(f"{len(late)} cancelled groups", "to end", timeout_s=CANCEL_GRACE_S):
            ended, late = await asyncio.wait(late, timeout=CANCEL_GRACE_S)
        done |= ended
    for task in done:
        if not task.cancelled():
            task.exception()  # seen: nobody else will ask for it
    if late:
        logger.warning("%d groups do not end although they were cancelled: they are left behind", len(late))
