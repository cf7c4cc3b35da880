"""Tracks the groups in flight in one rollout.

Invariant: every dispatched group comes back exactly once: from `next_finished`, or from `land`, either finished or in a
state that can be dispatched again. With `--partial-rollout` no sampled token is lost: a response that the default
generate function was sampling keeps its tokens, and groups with a custom generate function are held, which means that
their tasks stay alive and belong to the next rollout. A group with complete responses and slow rewards keeps its
responses, and is scored when it is dispatched again. Otherwise, and if the state of a sample cannot be trusted, the
prompts come back as they were dispatched, and the discarded tokens are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from slime.cluster.watchdog import waiting
from slime.data.sample import Sample
from slime.engine.http.client import EngineError
from slime.rollout.gate import Ticket
from slime.rollout.outcomes import Group, Produced, RolloutFailed, leaves, sampled_tokens, snapshot
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


@dataclass
class AbortResult:
    """Outcome of the groups still in flight when the batch was full; the `held` ones are still alive."""

    finished: list[Group] = field(default_factory=list)
    unfinished: list[Group] = field(default_factory=list)
    held: int = 0


class InflightGroups:
    """Dispatches groups and collects all of them.

    `thrown_away_tokens` counts tokens that were sampled and are neither trained on nor continued.
    """

    def __init__(self, runtime: RolloutRuntime) -> None:
        self._runtime = runtime
        self._state = runtime.state
        self._under_way: dict[asyncio.Task[Group], InflightGroup] = {}
        self._ended: set[asyncio.Task[Group]] = set()
        self._news = asyncio.Event()
        self._count = 0
        self._left_behind: set[asyncio.Task[Group]] = set()
        self.thrown_away_tokens = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def dispatch_groups(self, groups: list[Group]) -> None:
        """Dispatch groups.

        With `--partial-rollout`, a group that cannot be continued from its tokens alone gets a ticket for the gate.
        """
        args = self._runtime.args
        prompts: list[Group] = [[snapshot(member) for member in group] for group in groups]
        tickets: list[Ticket | None] = []
        for group in groups:
            custom = (sample.generate_function_path or args.custom_generate_function_path for sample in leaves(group))
            holds = args.partial_rollout and any(custom)
            masks = args.mask_offpolicy_in_partial_rollout
            tickets.append(Ticket(self._state.gate, masks=masks) if holds else None)
        generated: list[dict[int, Produced]] = [{} for _ in groups]
        tasks = self._state.submit_generate_tasks(groups, tickets, generated)
        for task, group, prompt, ticket, complete in zip(tasks, groups, prompts, tickets, generated, strict=True):
            self._watch(InflightGroup(task, group, prompt, ticket, complete))

    def adopt(self) -> None:
        """Take over the groups that the last rollout held, and let them continue."""
        held, self._state.held = self._state.held, []
        for one in held:
            self._watch(one)
            if self._runtime.args.mask_offpolicy_in_partial_rollout:
                for sample in _unfinished(one.group):
                    sample.loss_mask = [0] * sample.response_length  # sampled by earlier weights
        self._state.remaining_batch_size += len(held)
        self._state.gate.open()

    async def next_finished(self) -> list[Group]:
        """Wait until groups finish, and return all finished ones in the order of their dispatch."""
        with waiting(f"{len(self)} groups under way", "to finish one of them", timeout_s=None):
            while not self._ended:
                self._news.clear()
                await self._news.wait()
        groups: list[Group] = []
        for task in sorted(self._ended, key=lambda task: self._under_way[task].order):
            group = result_of(task)
            one = self._forget(task)
            if one.was_held and not _is_finished(group):
                self._state.remaining_batch_size -= 1  # an earlier rollout cut it off outside the gate
                self.dispatch_groups([self._to_continue(group, one)])
            else:
                groups.append(group)
        return groups

    async def land(self) -> AbortResult:
        """Close the gate, abort the groups in flight, wait until they end or are held, and sort them by outcome."""
        self._state.gate.close()
        self._state.aborted = True
        try:
            await self._abort()
        finally:
            self._state.aborted = False
        landed = AbortResult()
        for task, one in list(self._under_way.items()):
            if not task.done() and task not in self._left_behind:
                del self._under_way[task]
                self._ended.discard(task)
                for sample in _unfinished(one.group):
                    sample.metadata.setdefault("start_rollout_id", self._state.rollout_id)
                if not one.was_held:
                    task.add_done_callback(_report_failure)
                one.was_held = True
                self._state.held.append(one)
                landed.held += 1
                continue
            self._forget(task)
            if not task.done() or task.cancelled():
                landed.unfinished.append(self._generated(one))
            elif _is_finished(task.result()):
                landed.finished.append(task.result())
            else:
                landed.unfinished.append(self._to_continue(task.result(), one))
        return landed

    async def cancel(self) -> None:
        """Cancel all groups, held ones too; used when a rollout failed."""
        await cancel_and_wait(self._under_way)
        for task in list(self._under_way):
            self._forget(task)
        await self._state.cancel_held()

    # ending

    async def _abort(self) -> None:
        """Abort requests until none is at the engines and all tasks that are not held have ended.

        Tasks that are late at the deadline are cancelled.
        """
        if all(task.done() for task in self._under_way):
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        idle = asyncio.ensure_future(self._state.gate.wait_until_idle())
        try:
            while loop.time() - began < ABORT_DEADLINE_S:
                await abort_requests(self._runtime)
                in_grace = loop.time() - began < OWN_CLIENT_GRACE_S
                pending = {one.task for one in self._under_way.values() if _must_end(one, in_grace)}
                if not pending and idle.done():
                    return
                left_s = began + ABORT_DEADLINE_S - loop.time()
                with waiting(f"{len(self)} groups under way", "to end after an abort", timeout_s=left_s):
                    await asyncio.wait(pending | {idle}, timeout=ABORT_AGAIN_S)
        finally:
            idle.cancel()
        late = {
            one.task
            for one in self._under_way.values()
            if _must_end(one, False)
            or (not one.task.done() and one.ticket is not None and one.ticket.in_flight > 0)  # at an engine
        }
        if not late:
            return
        logger.warning(
            "%d groups did not end within %g s of being aborted: complete responses are scored later, other prompts "
            "start over",
            len(late),
            ABORT_DEADLINE_S,
        )
        await cancel_and_wait(late)
        self._left_behind |= {task for task in late if not task.done()}

    # what comes back

    def _watch(self, one: InflightGroup) -> None:
        """Register a group, and a callback for its end, so that waiting does not scan all tasks."""
        self._count += 1
        one.order = self._count
        self._under_way[one.task] = one
        one.task.add_done_callback(self._has_ended)

    def _has_ended(self, task: asyncio.Task[Group]) -> None:
        if task in self._under_way:
            self._ended.add(task)
            self._news.set()

    def _generated(self, one: InflightGroup) -> Group:
        """Return a cancelled group for a new dispatch: complete responses keep their tokens, others start over.

        Without `--partial-rollout`, all members of a group must be sampled by the same weights: the complete responses
        are kept only if all members are complete.
        """
        known = [one.generated.get(id(member)) if isinstance(member, Sample) else member for member in one.group]
        kept: Group = one.prompts
        if self._runtime.args.partial_rollout:
            pairs = zip(known, one.prompts, strict=True)
            kept = [prompt if produced is None else produced for produced, prompt in pairs]
        elif all(produced is not None and not _is_aborted(produced) for produced in known):
            kept = [produced for produced in known if produced is not None]
        self.thrown_away_tokens += max(0, sampled_tokens(one.group) - sampled_tokens(kept))
        if not self._runtime.args.partial_rollout:
            return kept
        return [
            self._continued(member, prompt) if _is_aborted(member) else member
            for member, prompt in zip(kept, one.prompts, strict=True)
        ]

    def _to_continue(self, group: Group, one: InflightGroup) -> Group:
        """Return an aborted group in the state in which it goes back to the buffer."""
        if not self._runtime.args.partial_rollout:
            self.thrown_away_tokens += one.lost_tokens(group)
            return one.prompts
        return [
            self._continued(member, prompt) if _is_aborted(member) else member
            for member, prompt in zip(group, one.prompts, strict=True)
        ]

    def _continued(self, member: Produced, prompt: Produced) -> Produced:
        if not isinstance(member, Sample):
            self.thrown_away_tokens += max(0, sampled_tokens([member]) - sampled_tokens([prompt]))
            return prompt  # samples of one generate call cannot be continued individually
        if member.response_length:
            member.metadata.setdefault("start_rollout_id", self._state.rollout_id)
        return member

    def _forget(self, task: asyncio.Task[Group]) -> InflightGroup:
        one = self._under_way.pop(task)
        self._ended.discard(task)
        place, one.generated = one.generated, dict(one.generated)
        place.clear()  # connections and timers keep contexts alive, and these would keep the samples
        self._state.pendings.discard(task)
        if one.ticket is not None:
            self.thrown_away_tokens += one.ticket.thrown_away_tokens
            one.ticket.thrown_away_tokens = 0
        return one


async def abort_requests(runtime: RolloutRuntime) -> None:
    """Abort all requests, so that the engines answer with the tokens sampled so far."""
    if not runtime.engine_urls:
        return
    try:
        await runtime.pool.broadcast("abort", abort_all=True, timeout_s=ABORT_DEADLINE_S)
    except EngineError as error:
        logger.warning("requests could not be aborted and run to their end: %s", error)


def _must_end(one: InflightGroup, in_grace: bool) -> bool:
    """Return whether `land` waits for a task instead of holding it."""
    if one.task.done():
        return False
    return one.ticket is None or (in_grace and not one.ticket.is_used)


def _report_failure(task: asyncio.Task[Group]) -> None:
    """Log the failure of a held group at once; the next rollout raises it."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("a group that waits for the next rollout failed: %s", error)


def _unfinished(group: Group) -> list[Sample]:
    return [sample for sample in leaves(group) if sample.reward is None and sample.status is not Sample.Status.FAILED]


def _is_aborted(member: Produced) -> bool:
    return any(sample.status is Sample.Status.ABORTED for sample in leaves([member]))


def _is_finished(group: Group) -> bool:
    return not any(_is_aborted(member) for member in group)


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
