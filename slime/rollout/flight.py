"""The groups under way in one rollout.

Invariant: every group that took off comes back exactly once: from `next_finished`, or from `land`, there either
finished or as something that can be dispatched again. What was cut off keeps what it has with `--partial-rollout`;
otherwise, and wherever a sample's state cannot be trusted, the prompts come back as they took off.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from dataclasses import dataclass, field
from typing import Any

from slime.data.sample import Sample
from slime.engine.client import EngineError
from slime.rollout.base_types import Group, Produced, leaves
from slime.rollout.runtime import RolloutRuntime

logger = logging.getLogger(__name__)

ABORT_DEADLINE_S = 30.0
"""How long aborted requests, tools and rewards may take to end before they are cancelled."""
ABORT_AGAIN_S = 0.2
"""Multi-turn functions send their next request after an aborted one: the abort is repeated."""


@dataclass
class Landed:
    """What became of the groups that were still under way when the batch was full."""

    finished: list[Group] = field(default_factory=list)
    unfinished: list[Group] = field(default_factory=list)


class Flight:
    """Dispatches groups and gets all of them back."""

    def __init__(self, runtime: RolloutRuntime) -> None:
        self._runtime = runtime
        self._prompts: dict[asyncio.Task[Group], Group] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def take_off(self, groups: list[Group]) -> None:
        """Start generating groups."""
        prompts = [[_snapshot(member) for member in group] for group in groups]
        tasks = self._runtime.state.submit_generate_tasks(groups)
        self._prompts.update(zip(tasks, prompts, strict=True))

    async def next_finished(self) -> list[Group]:
        """Wait until groups finish; all that have, in the order they took off."""
        done, _ = await asyncio.wait(self._prompts, return_when=asyncio.FIRST_COMPLETED)
        finished = [task for task in self._prompts if task in done]
        groups = [task.result() for task in finished]
        for task in finished:
            self._forget(task)
        return groups

    async def land(self) -> Landed:
        """Abort what is under way, wait until it has ended, and sort it."""
        landed = Landed()
        if self._prompts:
            await self._abort()
        for task, prompts in list(self._prompts.items()):
            if task.cancelled():
                landed.unfinished.append(prompts)
            elif _is_finished(task.result()):
                landed.finished.append(task.result())
            else:
                landed.unfinished.append(self._to_continue(task.result(), prompts))
            self._forget(task)
        return landed

    async def cancel(self) -> None:
        """End everything at once; for rollouts that failed."""
        for task in self._prompts:
            task.cancel()
        await asyncio.gather(*self._prompts, return_exceptions=True)
        for task in list(self._prompts):
            self._forget(task)

    async def _abort(self) -> None:
        """Until all tasks have ended or the deadline is over; what then still runs is cancelled."""
        self._runtime.state.aborted = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ABORT_DEADLINE_S
        pending = set(self._prompts)
        while pending and loop.time() < deadline:
            await self._abort_requests()
            _, pending = await asyncio.wait(pending, timeout=ABORT_AGAIN_S)
        if pending:
            logger.warning(
                "%d groups did not end within %g s of being aborted: their prompts start over",
                len(pending),
                ABORT_DEADLINE_S,
            )
            for task in pending:
                task.cancel()
            await asyncio.wait(pending)

    async def _abort_requests(self) -> None:
        if not self._runtime.engine_urls:
            return
        try:
            await self._runtime.pool.broadcast("abort", abort_all=True, timeout_s=ABORT_DEADLINE_S)
        except EngineError as error:
            logger.warning("requests could not be aborted, they run to their end: %s", error)

    def _to_continue(self, group: Group, prompts: Group) -> Group:
        """A group that was cut off, as it goes back to the buffer."""
        if not self._runtime.args.partial_rollout:
            return prompts
        return [
            self._continued(member, prompt) if _is_aborted(member) else member
            for member, prompt in zip(group, prompts, strict=True)
        ]

    def _continued(self, member: Produced, prompt: Produced) -> Produced:
        if not isinstance(member, Sample):
            return prompt  # one generate call made several samples: none of them can be continued alone
        if member.response_length:
            member.metadata.setdefault("start_rollout_id", self._runtime.state.rollout_id)
        return member

    def _forget(self, task: asyncio.Task[Group]) -> None:
        del self._prompts[task]
        self._runtime.state.pendings.discard(task)


def _is_aborted(member: Produced) -> bool:
    return any(sample.status is Sample.Status.ABORTED for sample in leaves([member]))


def _is_finished(group: Group) -> bool:
    return not any(_is_aborted(member) for member in group)


def _snapshot(member: Produced) -> Produced:
    """A copy that generate functions, which may write into what they get, cannot reach."""
    if not isinstance(member, Sample):
        return [_copied(sample) for sample in member]
    return _copied(member)


def _copied(sample: Sample) -> Sample:
    twin = copy.copy(sample)
    for name, value in vars(sample).items():
        setattr(twin, name, _copied_value(value))
    return twin


def _copied_value(value: Any) -> Any:
    if isinstance(value, list) and (not value or isinstance(value[0], int | float)):
        return list(value)  # token ids and log-probs: thousands of numbers, which nothing can change in place
    return copy.deepcopy(value)
