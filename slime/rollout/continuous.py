"""Generation that never stops: groups are dispatched as the budget allows and taken in batches as they finish.

Notation: B groups per rollout, S the bound on staleness, v the version of the engines, r the next rollout to be taken.
Of all groups counted through the run, the n-th is taken by rollout floor(n / B) at the latest, so it may be dispatched
when floor(n / B) - v <= S: there are never more than (v + S + 1 - r) B groups under way or ready. A rollout waits for
the groups that the next one would find too old, and takes the oldest of the others. So nothing that was sampled becomes
too old, and long responses are neither thrown away nor left to the end.

Invariant: every group that the data source handed out is under way, ready, taken, or dropped with its reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from slime.cluster.watchdog import Background, background
from slime.config import Config
from slime.config.async_mode import DEFAULT_STALENESS, versions_behind
from slime.data.sample import Sample
from slime.rollout.filters import DynamicFilterOutput, GroupJudge, call_plugins
from slime.rollout.inflight import cancelled, result_of
from slime.rollout.metrics import rollout_metrics, tail_seconds
from slime.rollout.outcomes import (
    Group,
    RolloutFnTrainOutput,
    group_order,
    leaves,
    refuse_all_failed,
    snapshot,
    tell_rollout_id,
)
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.sample_pipeline import refuse_bad_rewards
from slime.rollout.staleness import StaleGroups, group_version

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Dispatched:
    """A group, its prompts as they were, and the oldest weights that have sampled or will sample it.

    The version is found once, when the group takes off and again when it arrives; `known` says whether its tokens
    tell it. `arrived_at` is when it was ready.
    """

    group: Group
    prompts: Group
    version: int
    known: bool = False
    arrived_at: float = 0.0


class ContinuousRollout:
    """The groups of a fully asynchronous run. Lives on the runtime's event loop; `start` begins, `aclose` ends it.

    `first` is the first rollout that will be taken from here, `version` that of the engines.
    """

    def __init__(self, runtime: RolloutRuntime, data_source: Any, *, first: int, total: int, version: int) -> None:
        self._runtime = runtime
        self._args = runtime.args
        self._staleness = _bound(runtime.args)
        self._source = data_source
        self._next, self._total, self._version = first, total, version
        self._under_way: dict[asyncio.Task[Group], _Dispatched] = {}
        self._versions: Counter[int] = Counter()
        """How many groups under way have which version."""
        self._ended: deque[asyncio.Task[Group]] = deque()
        self._ready: list[_Dispatched] = []
        self._again: deque[Group] = deque()
        self._exhausted = False
        runtime.state.rollout_id = first
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self._serving: Background | None = None
        self._judge = GroupJudge(runtime, f"rollout {first}", data_source)
        self._stale = StaleGroups(runtime)
        self._since = time.monotonic()

    async def start(self) -> None:
        """Begin to generate."""
        self._count_anew()
        self._serving = background("continuous rollout", self._serve())

    async def take(self, rollout_id: int) -> RolloutFnTrainOutput:
        """The groups of one rollout; waits until they are there. Raises what ended the generation."""
        assert rollout_id >= self._next, f"rollout {rollout_id} was taken before"
        self._next = rollout_id
        self._runtime.state.rollout_id = rollout_id
        self._changed.set()
        taken = await self._batch(rollout_id)
        tail = tail_seconds([one.arrived_at for one in taken], time.monotonic())
        groups = sorted((one.group for one in taken), key=group_order)
        judge, self._judge = self._judge, GroupJudge(self._runtime, f"rollout {rollout_id + 1}", self._source)
        self._judge.repetitions = judge.repetitions.only(leaves([one.group for one in self._ready]))
        self._next = rollout_id + 1
        samples = list(leaves(groups))
        refuse_all_failed(samples, f"rollout {rollout_id}")
        await call_plugins(self._runtime, groups, judge, self._source)
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
        """The engines have new weights: more groups may be dispatched."""
        self._version = version
        self._changed.set()

    async def aclose(self) -> None:
        """End everything under way."""
        self._runtime.pulse.end()
        if self._serving is not None:
            await self._serving.aclose()
        await cancelled(self._under_way)
        self._under_way.clear()

    def _count_anew(self) -> None:
        """What is ready already belongs to the rollout that is taken next."""
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
            asyncio.get_running_loop().call_soon(self._news.set)  # whoever waits finds out what ended it

    async def _top_up(self) -> None:
        last = min(self._version + self._staleness + 1, self._total)
        room = (last - self._next) * self._args.rollout_batch_size - len(self._under_way) - len(self._ready)
        while room > 0:
            groups = [self._again.popleft() for _ in range(min(room, len(self._again)))]
            if not groups:
                tell_rollout_id(self._source, self._next)
                groups = await self._runtime.off_loop(self._source.get_samples, "the data source", room)
                self._exhausted = not groups
            if not groups:
                break
            fit = [fresh for group in groups if (fresh := self._stale.fit(group, self._next)) is not None]
            self._dispatch(fit)
            room -= len(fit)

    def _dispatch(self, groups: list[Group]) -> None:
        prompts = [[snapshot(member) for member in group] for group in groups]
        tasks = self._runtime.state.submit_generate_tasks(groups)
        for task, group, prompt in zip(tasks, groups, prompts, strict=True):
            known = group_version(group)
            version = self._version if known is None else min(known, self._version)
            self._under_way[task] = _Dispatched(group, prompt, version)
            self._versions[version] += 1
            task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[Group]) -> None:
        self._runtime.state.pendings.discard(task)
        self._ended.append(task)
        self._changed.set()

    # collecting

    async def _land(self, task: asyncio.Task[Group]) -> None:
        """A group counts as under way until its verdict is there."""
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
        else:
            self._arrived(dispatched, group, verdict)

    def _arrived(self, dispatched: _Dispatched, group: Group, verdict: DynamicFilterOutput) -> None:
        outstanding = len(self._under_way) + len(self._ready) + len(self._again)
        if not self._judge.keeps(group, verdict, insufficient=outstanding < self._args.rollout_batch_size):
            return
        version = group_version(group)
        arrived = _Dispatched(group, dispatched.prompts, dispatched.version if version is None else version)
        arrived.known = version is not None
        if self._is_stale(arrived, self._next):
            self._give_up(arrived, self._next)
        else:
            arrived.arrived_at = time.monotonic()
            self._ready.append(arrived)

    async def _batch(self, rollout_id: int) -> list[_Dispatched]:
        """What is too old for this rollout is given up first; what arrives from now on is looked at when it does."""
        assert self._serving is not None, "start() comes first"
        self._refuse_stale(rollout_id)
        while not self._is_there(rollout_id):
            self._serving.check()
            self._news.clear()
            await self._news.wait()
        self._ready.sort(key=lambda one: (one.version, group_order(one.group)))
        size = self._args.rollout_batch_size
        taken, self._ready = self._ready[:size], self._ready[size:]
        return taken

    def _is_there(self, rollout_id: int) -> bool:
        if any(version <= rollout_id - self._staleness for version in self._versions):
            return False  # the next rollout would find it too old
        nothing_more = self._exhausted and not self._under_way and not self._again
        return len(self._ready) >= self._args.rollout_batch_size or nothing_more

    def _refuse_stale(self, rollout_id: int) -> None:
        looked_at, self._ready = self._ready, []
        for one in looked_at:
            if self._is_stale(one, rollout_id):
                self._give_up(one, rollout_id)
            else:
                self._ready.append(one)

    def _is_stale(self, one: _Dispatched, rollout_id: int) -> bool:
        return one.known and rollout_id - one.version > self._staleness

    def _give_up(self, one: _Dispatched, rollout_id: int) -> None:
        fresh = self._stale.fit(one.group, rollout_id, one.prompts)
        if fresh is not None:
            self._again.append(fresh)
        self._changed.set()


def _bound(config: Config) -> int:
    """S. The run's own mode has one; other loops ask for a rollout at most so many versions late."""
    if config.max_weight_staleness is not None:
        return config.max_weight_staleness
    return max(DEFAULT_STALENESS, versions_behind(config))


async def taken_from_continuous(runtime: RolloutRuntime, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """A rollout of a generation that goes on between two calls, for rollout functions of users; begun by the first."""
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
