"""Ends the groups in flight: aborts their requests, cancels their tasks, and reads their results.

Invariant: no wait for an aborted or cancelled group is without a deadline; a task that ignores its cancellation is
abandoned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from slime.cluster.watchdog import waiting
from slime.data.sample import Sample
from slime.engine.http.client import EngineError
from slime.rollout.outcomes import Group, RolloutFailed, leaves
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.state import InflightGroup

logger = logging.getLogger(__name__)

ABORT_DEADLINE_S = 30.0
"""Time in which aborted requests, tools and rewards must end before they are cancelled."""
ABORT_AGAIN_S = 0.2
"""Interval at which the abort is repeated, because multi-turn functions send a new request after an aborted one."""
OWN_CLIENT_GRACE_S = 0.5
"""Time to wait for a group with a ticket that sent no request through the gate, before it is held.

With its own HTTP client it gets the aborted answer and ends in this time.
"""
CANCEL_GRACE_S = 10.0
"""Time in which a cancelled task must end before it is abandoned."""


async def abort_and_wait(runtime: RolloutRuntime, groups: Collection[InflightGroup]) -> set[asyncio.Task[Group]]:
    """Abort requests until none is at the engines and all tasks that will not be held have ended.

    Consumes: groups in flight, behind a closed gate. Waits for: tasks without a ticket, and the requests of the others.
    Unblocked by: the engines, which answer aborted requests with what they have. Produces: the tasks that did not end
    after they were cancelled at the deadline.
    """
    if all(one.task.done() for one in groups):
        return set()

    def must_end(one: InflightGroup, in_grace: bool) -> bool:
        return not one.task.done() and (one.ticket is None or (in_grace and not one.ticket.is_used))

    loop = asyncio.get_running_loop()
    began = loop.time()
    idle = asyncio.ensure_future(runtime.state.gate.wait_until_idle())
    try:
        while loop.time() - began < ABORT_DEADLINE_S:
            await abort_requests(runtime)
            in_grace = loop.time() - began < OWN_CLIENT_GRACE_S
            pending = {one.task for one in groups if must_end(one, in_grace)}
            if not pending and idle.done():
                return set()
            left_s = began + ABORT_DEADLINE_S - loop.time()
            with waiting(f"{len(groups)} groups under way", "to end after an abort", timeout_s=left_s):
                await asyncio.wait(pending | {idle}, timeout=ABORT_AGAIN_S)
    finally:
        idle.cancel()
    late = {
        one.task
        for one in groups
        if must_end(one, False)
        or (not one.task.done() and one.ticket is not None and one.ticket.in_flight > 0)  # at an engine
    }
    if late:
        logger.warning(
            "%d groups did not end within %g s of being aborted: complete responses are scored later, other prompts "
            "start over",
            len(late),
            ABORT_DEADLINE_S,
        )
        await cancel_and_wait(late)
    return {task for task in late if not task.done()}


async def abort_requests(runtime: RolloutRuntime) -> None:
    """Abort all requests, so that the engines answer with the tokens sampled so far."""
    if not runtime.engine_urls:
        return
    try:
        await runtime.pool.broadcast("abort", abort_all=True, timeout_s=ABORT_DEADLINE_S)
    except EngineError as error:
        logger.warning("requests could not be aborted and run to their end: %s", error)


def result_of(task: asyncio.Task[Group]) -> Group:
    """Return the group of a task that has ended; the rollout itself does not cancel a group that it still needs."""
    if task.cancelled():
        raise RolloutFailed(
            "a group was cancelled from inside: a generate, hook or reward function let a CancelledError out"
        )
    return task.result()


async def cancel_and_wait(tasks: Collection[asyncio.Task[Group]]) -> None:
    """Cancel tasks and wait until they have ended; tasks that ignore the cancellation are abandoned."""
    done, late = {task for task in tasks if task.done()}, {task for task in tasks if not task.done()}
    for task in late:
        task.cancel()
    if late:
        with waiting(f"{len(late)} cancelled groups", "to end", timeout_s=CANCEL_GRACE_S):
            ended, late = await asyncio.wait(late, timeout=CANCEL_GRACE_S)
        done |= ended
    for task in done:
        if not task.cancelled():
            task.exception()  # marks the error as retrieved
    if late:
        logger.warning("%d groups did not end after they were cancelled: they are abandoned", len(late))


def report_failure(task: asyncio.Task[Group]) -> None:
    """Log the failure of a held group at once; the next rollout raises it."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("a group that waits for the next rollout failed: %s", error)


def unscored(group: Group) -> list[Sample]:
    """Return the samples of a group that have neither a reward nor failed."""
    return [sample for sample in leaves(group) if sample.reward is None and sample.status is not Sample.Status.FAILED]


def is_cut(group: Group) -> bool:
    """Return whether a sample of the group was aborted."""
    return any(sample.status is Sample.Status.ABORTED for sample in leaves(group))
