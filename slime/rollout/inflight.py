"""The groups under way in one rollout.

Invariant: every group that took off comes back exactly once: from `next_finished`, or from `land`, there either
finished or as something that can be dispatched again. With `--partial-rollout` nothing that was sampled is lost: what
the default generate was cut off in keeps its tokens, and groups with a custom generate function are held, which means
that their tasks live on and belong to the next flight. A group whose responses are complete, and whose rewards are
slow, comes back with them, to be scored when it is dispatched again. Otherwise, and wherever a sample's state cannot be
trusted, the prompts come back as they took off, and the tokens thrown away with that are counted.
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
from slime.rollout.state import UnderWay

logger = logging.getLogger(__name__)

ABORT_DEADLINE_S = 30.0
"""How long aborted requests, tools and rewards may take to end before they are cancelled."""
ABORT_AGAIN_S = 0.2
"""Multi-turn functions send their next request after an aborted one: the abort is repeated."""
OWN_CLIENT_GRACE_S = 0.5
"""How long a group to be held that never sent a request through the gate is watched: with an HTTP client of its own it
gets the aborted answer, and ends."""
CANCEL_GRACE_S = 10.0
"""How long a task may take to end once it is cancelled, before it is left behind."""


@dataclass
class Landed:
    """What became of the groups that were still under way when the batch was full; `held` ones are still alive."""

    finished: list[Group] = field(default_factory=list)
    unfinished: list[Group] = field(default_factory=list)
    held: int = 0


class Flight:
    """Dispatches groups and gets all of them back. `thrown_away_tokens`: sampled, and neither trained nor continued."""

    def __init__(self, runtime: RolloutRuntime) -> None:
        self._runtime = runtime
        self._state = runtime.state
        self._under_way: dict[asyncio.Task[Group], UnderWay] = {}
        self._ended: set[asyncio.Task[Group]] = set()
        self._news = asyncio.Event()
        self._count = 0
        self._left_behind: set[asyncio.Task[Group]] = set()
        self.thrown_away_tokens = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def take_off(self, groups: list[Group]) -> None:
        """Start generating groups."""
        prompts: list[Group] = [[snapshot(member) for member in group] for group in groups]
        tickets = [self._ticket(group) for group in groups]
        generated: list[dict[int, Produced]] = [{} for _ in groups]
        tasks = self._state.submit_generate_tasks(groups, tickets, generated)
        for task, group, prompt, ticket, complete in zip(tasks, groups, prompts, tickets, generated, strict=True):
            self._watch(UnderWay(task, group, prompt, ticket, complete))

    def adopt(self) -> None:
        """Take over the groups that the last flight held, and let them go on."""
        held, self._state.held = self._state.held, []
        for one in held:
            self._watch(one)
            if self._runtime.args.mask_offpolicy_in_partial_rollout:
                _mask_unfinished(one.group)
        self._state.remaining_batch_size += len(held)
        self._state.gate.open()

    async def next_finished(self) -> list[Group]:
        """Wait until groups finish; all that have, in the order they took off."""
        with waiting(f"{len(self)} groups under way", "to finish one of them", timeout_s=None):
            while not self._ended:
                self._news.clear()
                await self._news.wait()
        groups: list[Group] = []
        for task in sorted(self._ended, key=lambda task: self._under_way[task].order):
            group = result_of(task)
            one = self._forget(task)
            if one.was_held and not _is_finished(group):
                self._state.remaining_batch_size -= 1  # cut off behind the gate's back, in an earlier rollout
                self.take_off([self._to_continue(group, one)])
            else:
                groups.append(group)
        return groups

    async def land(self) -> Landed:
        """Close the gate, abort what is under way, wait until it has ended or is held, and sort it."""
        self._state.gate.close()
        self._state.aborted = True
        try:
            await self._abort()
        finally:
            self._state.aborted = False
        landed = Landed()
        for task, one in list(self._under_way.items()):
            if not task.done() and task not in self._left_behind:
                self._hold(one)
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
        """End everything at once, held groups too; for rollouts that failed."""
        await cancelled(self._under_way)
        for task in list(self._under_way):
            self._forget(task)
        await self._state.cancel_held()

    # ending

    async def _abort(self) -> None:
        """Until nothing is at the engines and all tasks that are not held have ended, or the deadline is over."""
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
        await self._cancel_late()

    async def _cancel_late(self) -> None:
        late = {one.task for one in self._under_way.values() if _must_end(one, False) or _is_at_engine(one)}
        if not late:
            return
        logger.warning(
            "%d groups did not end within %g s of being aborted: complete responses wait for their rewards, other "
            "prompts start over",
            len(late),
            ABORT_DEADLINE_S,
        )
        await cancelled(late)
        self._left_behind |= {task for task in late if not task.done()}

    # what comes back

    def _watch(self, one: UnderWay) -> None:
        """Hear of its end, whenever that is: whoever waits looks at those that have ended, not at all of them."""
        self._count += 1
        one.order = self._count
        self._under_way[one.task] = one
        one.task.add_done_callback(self._has_ended)

    def _has_ended(self, task: asyncio.Task[Group]) -> None:
        if task in self._under_way:
            self._ended.add(task)
            self._news.set()

    def _ticket(self, group: Group) -> Ticket | None:
        """A ticket for groups that cannot be continued from their tokens alone, if they are to be continued at all."""
        args = self._runtime.args
        custom = (sample.generate_function_path or args.custom_generate_function_path for sample in leaves(group))
        if not args.partial_rollout or not any(custom):
            return None
        return Ticket(self._state.gate, masks=args.mask_offpolicy_in_partial_rollout)

    def _hold(self, one: UnderWay) -> None:
        del self._under_way[one.task]
        self._ended.discard(one.task)
        for sample in _unfinished(one.group):
            sample.metadata.setdefault("start_rollout_id", self._state.rollout_id)
        if not one.was_held:
            one.task.add_done_callback(_report_failure)
        one.was_held = True
        self._state.held.append(one)

    def _generated(self, one: UnderWay) -> Group:
        """A group that was cancelled: complete responses wait for their rewards, the others start over.

        Without `--partial-rollout` no group is sampled by several versions of the weights: all of it, or nothing.
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

    def _to_continue(self, group: Group, one: UnderWay) -> Group:
        """A group that was cut off, as it goes back to the buffer."""
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
            return prompt  # one generate call made several samples: none of them can be continued alone
        if member.response_length:
            member.metadata.setdefault("start_rollout_id", self._state.rollout_id)
        return member

    def _forget(self, task: asyncio.Task[Group]) -> UnderWay:
        one = self._under_way.pop(task)
        self._ended.discard(task)
        place, one.generated = one.generated, dict(one.generated)
        place.clear()  # contexts live on in connections and timers, and would keep the samples
        self._state.pendings.discard(task)
        if one.ticket is not None:
            self.thrown_away_tokens += one.ticket.thrown_away_tokens
            one.ticket.thrown_away_tokens = 0
        return one


async def abort_requests(runtime: RolloutRuntime) -> None:
    """Have the engines answer what they have so far."""
    if not runtime.engine_urls:
        return
    try:
        await runtime.pool.broadcast("abort", abort_all=True, timeout_s=ABORT_DEADLINE_S)
    except EngineError as error:
        logger.warning("requests could not be aborted, they run to their end: %s", error)


def _must_end(one: UnderWay, in_grace: bool) -> bool:
    """Whether landing waits for a task, or leaves it alive."""
    if one.task.done():
        return False
    return one.ticket is None or (in_grace and not one.ticket.is_used)


def _is_at_engine(one: UnderWay) -> bool:
    return not one.task.done() and one.ticket is not None and one.ticket.in_flight > 0


def _report_failure(task: asyncio.Task[Group]) -> None:
    """A held group that failed says so at once; the next rollout raises it."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("a group that waits for the next rollout failed: %s", error)


def _unfinished(group: Group) -> list[Sample]:
    return [sample for sample in leaves(group) if sample.reward is None and sample.status is not Sample.Status.FAILED]


def _mask_unfinished(group: Group) -> None:
    """What the samples of a held group have so far was sampled by earlier weights."""
    for sample in _unfinished(group):
        sample.loss_mask = [0] * sample.response_length


def _is_aborted(member: Produced) -> bool:
    return any(sample.status is Sample.Status.ABORTED for sample in leaves([member]))


def _is_finished(group: Group) -> bool:
    return not any(_is_aborted(member) for member in group)


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
