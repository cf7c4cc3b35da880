"""Fully asynchronous generation: dispatches groups within a staleness budget, and returns finished groups in batches.

Notation: B groups per rollout, S the bound on staleness, v the version of the engines, r the next rollout to be taken.
If the groups of a run are numbered, the n-th is taken by rollout floor(n / B) at the latest, so it may be dispatched
when floor(n / B) - v <= S: at most (v + S + 1 - r) B groups are in flight or ready. A rollout waits for the groups that
would be too old for the next one, and takes the oldest of the others. Thus no sampled group becomes too old, and long
responses are neither discarded nor delayed to the end.

Invariant: every group that the data source handed out is in flight, ready, taken, or dropped with its reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass

from slime.cluster.watchdog import Background, background
from slime.config.async_mode import DEFAULT_STALENESS, max_versions_behind
from slime.data.sample import Sample
from slime.rollout.filters import GroupFilter, call_batch_plugins
from slime.rollout.inflight import cancel_and_wait, result_of
from slime.rollout.metrics import rollout_metrics, tail_seconds
from slime.rollout.outcomes import (
    Group,
    PromptSource,
    RolloutFnTrainOutput,
    group_order,
    leaves,
    refuse_all_failed,
    set_source_rollout_id,
    snapshot,
)
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sample_pipeline import refuse_bad_rewards
from slime.rollout.staleness import StaleGroups, group_version

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _TrackedGroup:
    """A dispatched group, a copy of its prompts, and the oldest weight version that sampled or will sample it.

    The version is computed when the group is dispatched and again when it arrives; `known` is True if its tokens carry
    a version. `arrived_at` is the time at which it was ready.
    """

    group: Group
    prompts: Group
    version: int
    known: bool = False
    arrived_at: float = 0.0


class ContinuousRollout:
    """Generates the groups of a fully asynchronous run on the runtime's event loop, from `start` to `aclose`.

    `first` is the first rollout that will be taken, `version` is the weight version of the engines.
    """

    def __init__(
        self, runtime: RolloutRuntime, data_source: PromptSource, *, first: int, total: int, version: int
    ) -> None:
        self._runtime = runtime
        self._args = runtime.args
        bound = runtime.args.max_weight_staleness
        self._staleness = max(DEFAULT_STALENESS, max_versions_behind(runtime.args)) if bound is None else bound
        """S. Without a bound, the number of versions by which a synchronous loop of the user may be behind."""
        self._source = data_source
        self._next, self._total, self._version = first, total, version
        self._under_way: dict[asyncio.Task[Group], _TrackedGroup] = {}
        self._versions: Counter[int] = Counter()
        """Number of groups in flight per weight version."""
        self._ended: deque[asyncio.Task[Group]] = deque()
        self._ready: list[_TrackedGroup] = []
        self._again: deque[Group] = deque()
        self._exhausted = False
        runtime.state.rollout_id = first
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self._serving: Background | None = None
        self._judge = GroupFilter(runtime, f"rollout {first}", data_source)
        self._stale = StaleGroups(runtime)
        self._since = time.monotonic()

    async def start(self) -> None:
        """Start generating."""
        self._count_anew()
        self._serving = background("continuous rollout", self._serve())

    async def take(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Wait for the groups of one rollout and return them; raises the error that ended the generation."""
        assert rollout_id >= self._next, f"rollout {rollout_id} was taken before"
        self._next = rollout_id
        self._runtime.state.rollout_id = rollout_id
        self._changed.set()
        assert self._serving is not None, "start() comes first"
        for one in list(self._ready):  # groups that finish later are checked on arrival
            if self._is_stale(one, rollout_id):
                self._ready.remove(one)
                self._give_up(one, rollout_id)
        size = self._args.rollout_batch_size
        while True:
            awaits_old = any(version <= rollout_id - self._staleness for version in self._versions)
            is_drained = self._exhausted and not self._under_way and not self._again
            # a group that would be too old for the next rollout is part of this one
            if not awaits_old and (len(self._ready) >= size or is_drained):
                break
            self._serving.check()
            self._news.clear()
            await self._news.wait()
        self._ready.sort(key=lambda one: (one.version, group_order(one.group)))
        taken, self._ready = self._ready[:size], self._ready[size:]
        tail = tail_seconds([one.arrived_at for one in taken], time.monotonic())
        groups = sorted((one.group for one in taken), key=group_order)
        judge, self._judge = self._judge, GroupFilter(self._runtime, f"rollout {rollout_id + 1}", self._source)
        self._judge.repetitions = judge.repetitions.only(leaves([one.group for one in self._ready]))
        self._next = rollout_id + 1
        samples = list(leaves(groups))
        refuse_all_failed(samples, f"rollout {rollout_id}")
        await call_batch_plugins(self._runtime, groups, judge, self._source)
        samples = list(leaves(groups))
        metrics = rollout_metrics(self._args, samples, time.monotonic() - self._since, judge.repetitions)
        metrics["perf/rollout_tail_time"] = tail
        metrics |= judge.metrics() | judge.removed() | self._stale.counted()
        metrics |= {
            "rollout/under_way_groups": float(len(self._under_way)),
            "rollout/ready_groups": float(len(self._ready)),
        }
        self._since = time.monotonic()
        self._count_anew()
        self._changed.set()
        return RolloutFnTrainOutput(groups, metrics)

    async def weights_arrived(self, version: int) -> None:
        """Set the weight version of the engines, which allows more groups to be dispatched."""
        self._version = version
        self._changed.set()

    async def aclose(self) -> None:
        """Cancel all groups in flight."""
        self._runtime.pulse.end()
        if self._serving is not None:
            await self._serving.aclose()
        await cancel_and_wait(self._under_way)
        self._under_way.clear()

    def _count_anew(self) -> None:
        """Restart the progress count; groups that are ready count for the next rollout."""
        size = self._args.n_samples_per_prompt
        self._runtime.pulse.begin(self._args.rollout_batch_size * size, done=len(self._ready) * size)

    # dispatching

    async def _serve(self) -> None:
        try:
            while True:
                self._changed.clear()
                await self._top_up()
                await self._changed.wait()
                while self._ended:
                    await self._land(self._ended.popleft())
                self._news.set()
        finally:
            asyncio.get_running_loop().call_soon(self._news.set)  # the waiting `take` then raises the error

    async def _top_up(self) -> None:
        """Dispatch groups up to the staleness budget."""
        last = min(self._version + self._staleness + 1, self._total)
        room = (last - self._next) * self._args.rollout_batch_size - len(self._under_way) - len(self._ready)
        while room > 0:
            groups = [self._again.popleft() for _ in range(min(room, len(self._again)))]
            if not groups:
                set_source_rollout_id(self._source, self._next)
                groups = await self._runtime.off_loop(self._source.get_samples, "the data source", room)
                self._exhausted = not groups
            if not groups:
                break
            fit = [fresh for group in groups if (fresh := self._stale.fit(group, self._next)) is not None]
            prompts = [[snapshot(member) for member in group] for group in fit]
            tasks = self._runtime.state.submit_generate_tasks(fit)
            for task, group, prompt in zip(tasks, fit, prompts, strict=True):
                known = group_version(group)
                version = self._version if known is None else min(known, self._version)
                self._under_way[task] = _TrackedGroup(group, prompt, version)
                self._versions[version] += 1
                task.add_done_callback(self._landed)
            room -= len(fit)

    def _landed(self, task: asyncio.Task[Group]) -> None:
        self._runtime.state.pendings.discard(task)
        self._ended.append(task)
        self._changed.set()

    # collecting

    async def _land(self, task: asyncio.Task[Group]) -> None:
        """Filter a finished group and add it to the ready ones; it counts as in flight until the filter returns."""
        group, verdict = result_of(task), None
        if not any(sample.status is Sample.Status.ABORTED for sample in leaves(group)):
            refuse_bad_rewards(self._args, list(leaves(group)))
            verdict = await self._judge.verdict(group)
        dispatched = self._under_way.pop(task)
        self._versions[dispatched.version] -= 1
        if not self._versions[dispatched.version]:
            del self._versions[dispatched.version]
        if verdict is None:
            self._again.append(group if all(isinstance(member, Sample) for member in group) else dispatched.prompts)
            return
        outstanding = len(self._under_way) + len(self._ready) + len(self._again)
        if not self._judge.keeps(group, verdict, insufficient=outstanding < self._args.rollout_batch_size):
            return
        version = group_version(group)
        arrived = _TrackedGroup(group, dispatched.prompts, dispatched.version if version is None else version)
        arrived.known = version is not None
        if self._is_stale(arrived, self._next):
            self._give_up(arrived, self._next)
        else:
            arrived.arrived_at = time.monotonic()
            self._ready.append(arrived)

    def _is_stale(self, one: _TrackedGroup, rollout_id: int) -> bool:
        return one.known and rollout_id - one.version > self._staleness

    def _give_up(self, one: _TrackedGroup, rollout_id: int) -> None:
        fresh = self._stale.fit(one.group, rollout_id, one.prompts)
        if fresh is not None:
            self._again.append(fresh)
        self._changed.set()


async def taken_from_continuous(
    runtime: RolloutRuntime, rollout_id: int, data_source: PromptSource
) -> RolloutFnTrainOutput:
    """Return a rollout of a generation that the first call starts, for rollout functions of users.

    The generation continues between two calls.
    """
    state = runtime.state
    known = state.weight_version
    version = int(known) if known is not None and known.isdigit() else rollout_id
    if state.continuous is None:
        assert runtime.args.num_rollout is not None, "a run knows how many rollouts it makes"
        total = runtime.args.num_rollout
        continuous = ContinuousRollout(runtime, data_source, first=rollout_id, total=total, version=version)
        await continuous.start()
        state.continuous = continuous
    await state.continuous.weights_arrived(version)
    output: RolloutFnTrainOutput = await state.continuous.take(rollout_id)
    return output
