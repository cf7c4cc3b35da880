"""Dispatches groups to the engines, and collects finished groups as batches.

One dispatcher serves all modes. They differ in the staleness S, the number of weight versions by which a group may be
behind the rollout that takes it:
- S = 0 (synchronous), and 1 for rollouts made one step ahead: `fill` makes one batch, then drains what is in flight;
- S > 0 (fully asynchronous): `start` keeps generating until `aclose`, and `take` returns one batch after another.

With B groups per rollout, v the version of the engines and r the next rollout to be taken: if the groups of a run are
numbered, the n-th is taken by rollout floor(n / B) at the latest, so it may be dispatched when floor(n / B) - v <= S:
at most (v + S + 1 - r) B groups are in flight or ready. `take` waits for the groups that would be too old for the next
rollout, and takes the oldest of the others. Thus no sampled group becomes too old, and long responses are neither
discarded nor delayed to the end.

Invariant: every group that the data source hands out ends exactly once: in a batch, dropped with its reason, or back in
the source's buffer (surplus finished groups, and those cut off when the batch was full), or held for the next rollout.
With `--partial-rollout` no sampled token is lost: a response that the default generate function was sampling keeps its
tokens, and groups with a custom generate function are held, which means that their tasks stay alive and belong to the
next rollout. A group with complete responses and slow rewards keeps its responses, and is scored when it is dispatched
again. Otherwise, and if the state of a sample cannot be trusted, the prompts come back as they were dispatched, and the
discarded tokens are counted. A batch is sorted by index.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter, deque
from collections.abc import Iterable
from math import isfinite

from slime.cluster.watchdog import Background, background, waiting
from slime.config.async_mode import DEFAULT_STALENESS, max_versions_behind
from slime.data.sample import Sample
from slime.rollout.filters import GroupFilter, call_batch_plugins
from slime.rollout.gate import Ticket
from slime.rollout.inflight import abort_and_wait, cancel_and_wait, is_cut, report_failure, result_of, unscored
from slime.rollout.metrics import Metrics, rollout_metrics, tail_seconds
from slime.rollout.outcomes import (
    Group,
    Produced,
    PromptSource,
    RolloutFnTrainOutput,
    group_order,
    group_version,
    is_stale,
    is_too_old,
    leaves,
    prompts_of,
    refuse_all_failed,
    sampled_tokens,
    set_source_rollout_id,
)
from slime.rollout.rewards.hub import refuse_bad_rewards
from slime.rollout.runtime import RolloutRuntime
from slime.rollout.state import InflightGroup


class Dispatcher:
    """Generates the groups of a rollout, or of a whole run, on the runtime's event loop.

    `rollout_id` is the first rollout that will be filled or taken.
    """

    def __init__(self, runtime: RolloutRuntime, source: PromptSource, rollout_id: int) -> None:
        self._runtime = runtime
        self._args = runtime.args
        self._state = runtime.state
        self._source = source
        self._next = rollout_id
        self._staleness = self._version = self._total = 0
        self._under_way: dict[asyncio.Task[Group], InflightGroup] = {}
        self._ended: set[asyncio.Task[Group]] = set()
        self._left_behind: set[asyncio.Task[Group]] = set()
        """Tasks that did not end after they were cancelled."""
        self._ready: list[InflightGroup] = []
        self._again: deque[Group] = deque()
        self._versions: Counter[int] = Counter()
        """Number of groups in flight per weight version."""
        self._count = 0
        self._exhausted = False
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self._serving: Background | None = None
        self._judge = GroupFilter(runtime, f"rollout {rollout_id}", source)
        self._since = time.monotonic()
        self._stale_groups = self._thrown_away_tokens = 0
        """Groups that were too old, and tokens that were sampled and are neither trained on nor continued."""

    # one batch

    async def fill(self) -> RolloutFnTrainOutput:
        """Generate one batch, and return the remaining groups to the data source.

        Consumes: the groups that the last rollout held, then prompts of the data source, while fewer groups than a
        batch are in flight or ready. Waits for: a group in flight. Unblocked by: the end of its task. Produces:
        `rollout_batch_size` groups, fewer if the source is exhausted. Failed samples stay in their groups, marked as
        failed; `RolloutFailed` is raised if all samples failed.
        """
        args, target, rollout_id = self._args, self._args.rollout_batch_size, self._next
        self._state.reset(rollout_id)
        held_groups, self._state.held = self._state.held, []
        for one in held_groups:  # they continue in this rollout
            self._watch(one)
            if args.mask_offpolicy_in_partial_rollout:
                for sample in unscored(one.group):
                    sample.loss_mask = [0] * sample.response_length  # sampled by earlier weights
        self._state.remaining_batch_size += len(held_groups)
        self._state.gate.open()
        surplus: list[Group] = []
        try:
            while len(self._ready) < target:
                await self._top_up()
                if not self._under_way:
                    break
                with waiting(f"{len(self._under_way)} groups under way", "to finish one of them", timeout_s=None):
                    while not self._ended:
                        self._changed.clear()
                        await self._changed.wait()
                for one in self._ended_in_order():
                    if len(self._ready) == target and not (one.was_held and is_cut(result_of(one.task))):
                        surplus.append(result_of(self._forget(one).task))
                    else:
                        await self._collect(one)
            tail = tail_seconds([one.arrived_at for one in self._ready], time.monotonic())
            self._state.gate.close()
            finished, unfinished, held = await self._drain() if self._under_way else ([], [], 0)
            surplus += finished
            if surplus or unfinished:
                returned = sorted(surplus, key=group_order) + sorted(unfinished, key=group_order)
                await self._runtime.off_loop(self._source.add_samples, "the data source", returned)
            groups, metrics = await self._finish(rollout_id, self._ready, self._judge, tail)
            over_samples = args.over_sampling_batch_size > target
            if over_samples or args.partial_rollout or args.dynamic_sampling_filter_path is not None:
                metrics |= self._judge.metrics() | {
                    "rollout/surplus_groups": float(len(surplus)),
                    "rollout/returned_groups": float(len(unfinished)),
                    "rollout/held_groups": float(held),
                }
                metrics |= self._waste()
            return RolloutFnTrainOutput(groups, metrics)
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._state.remaining_batch_size = 0

    # one batch after another

    async def start(self, *, total: int, version: int) -> None:
        """Start to generate for rollouts up to `total`; `version` is the weight version of the engines."""
        bound = self._args.max_weight_staleness  # without one: how far a synchronous loop of the user may be behind
        self._staleness = max(DEFAULT_STALENESS, max_versions_behind(self._args)) if bound is None else bound
        self._total, self._version = total, version
        self._state.rollout_id = self._next
        self._begin_progress()
        self._serving = background("continuous rollout", self._serve())

    async def _serve(self) -> None:
        """Dispatch groups within the staleness budget, and collect those that finish.

        Consumes: prompts of the data source. Waits for: `_changed`. Unblocked by: the end of a group's task, new
        weights, and `take`, which moves the budget. Produces: ready groups, for `take`.
        """
        try:
            while True:
                self._changed.clear()
                await self._top_up()
                await self._changed.wait()
                while self._ended:
                    for one in self._ended_in_order():
                        await self._collect(one)
                self._news.set()
        finally:
            asyncio.get_running_loop().call_soon(self._news.set)  # the waiting `take` then raises the error

    async def take(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Wait for the groups of one rollout and return them; raises the error that ended the generation.

        Consumes: ready groups. Waits for: a full batch, and for groups in flight that would be too old for the next
        rollout. Unblocked by: `_serve`, after each group that it collects. Produces: the oldest groups, as a batch.
        """
        assert rollout_id >= self._next, f"rollout {rollout_id} was taken before"
        assert self._serving is not None, "start() comes first"
        self._next = self._state.rollout_id = rollout_id
        self._changed.set()
        ready, self._ready = self._ready, []
        for one in ready:  # groups that finish later are checked on arrival
            if is_too_old(self._args, one.sampled_version, rollout_id):
                self._regenerate_or_drop(one)
            else:
                self._ready.append(one)
        size = self._args.rollout_batch_size
        while True:
            awaits_old = any(version <= rollout_id - self._staleness for version in self._versions)
            is_drained = self._exhausted and not self._under_way and not self._again
            if not awaits_old and (len(self._ready) >= size or is_drained):
                break
            self._serving.check()
            self._news.clear()
            await self._news.wait()
        self._ready.sort(key=lambda one: (one.version, group_order(one.group)))
        taken, self._ready = self._ready[:size], self._ready[size:]
        tail = tail_seconds([one.arrived_at for one in taken], time.monotonic())
        judge, self._judge = self._judge, GroupFilter(self._runtime, f"rollout {rollout_id + 1}", self._source)
        self._judge.repetitions = judge.repetitions.only(leaves([one.group for one in self._ready]))
        self._next = rollout_id + 1
        groups, metrics = await self._finish(rollout_id, taken, judge, tail)
        metrics |= judge.metrics() | self._waste()
        metrics |= {
            "rollout/under_way_groups": float(len(self._under_way)),
            "rollout/ready_groups": float(len(self._ready)),
        }
        self._since = time.monotonic()
        self._begin_progress()
        self._changed.set()
        return RolloutFnTrainOutput(groups, metrics)

    async def weights_arrived(self, version: int) -> None:
        """Set the weight version of the engines, which allows more groups to be dispatched."""
        self._version = version
        self._changed.set()

    async def aclose(self) -> None:
        """Cancel all groups, held ones too."""
        if self._serving is not None:
            self._runtime.pulse.end()
            await self._serving.aclose()
        await cancel_and_wait(self._under_way)
        for one in list(self._under_way.values()):
            self._forget(one)
        await self._state.cancel_held()

    def _begin_progress(self) -> None:
        """Restart the progress count; groups that are ready count for the next rollout."""
        size = self._args.n_samples_per_prompt
        self._runtime.pulse.begin(self._args.rollout_batch_size * size, done=len(self._ready) * size)

    # dispatching and collecting

    async def _top_up(self) -> None:
        """Dispatch groups while there is room: in a filled batch `over_sampling_batch_size` at a time, else within the
        staleness budget."""
        while True:
            size, busy = self._args.rollout_batch_size, len(self._under_way) + len(self._ready)
            if self._serving is None:
                room = self._args.over_sampling_batch_size if busy < size else 0
            else:
                room = (min(self._version + self._staleness + 1, self._total) - self._next) * size - busy
            groups = [self._again.popleft() for _ in range(min(room, len(self._again)))]
            if room > 0 and not groups:
                set_source_rollout_id(self._source, self._next)
                groups = await self._runtime.off_loop(self._source.get_samples, "the data source", room)
                self._exhausted = not groups
            if not groups:
                return
            if self._args.max_weight_staleness is not None:
                fit = [self._regenerated(one) if is_stale(self._args, one, self._next) else one for one in groups]
                groups = [group for group in fit if group is not None]
            self._dispatch(groups)

    def _dispatch(self, groups: list[Group]) -> None:
        """Dispatch groups.

        With `--partial-rollout`, a group that cannot be continued from its tokens alone gets a ticket for the gate.
        """
        args, state = self._args, self._state
        for group in groups:
            prompt: Group = [copy.deepcopy(member) for member in group]  # generate functions may write into the members
            custom = (sample.generate_function_path or args.custom_generate_function_path for sample in leaves(group))
            holds = self._serving is None and args.partial_rollout and any(custom)
            ticket = Ticket(state.gate, masks=args.mask_offpolicy_in_partial_rollout) if holds else None
            generated: dict[int, Produced] = {}
            task = asyncio.create_task(
                state.dispatch(group, copy.deepcopy(state.sampling_params), generated),
                context=None if ticket is None else ticket.context(),
            )
            state.pendings.add(task)
            state.remaining_batch_size += 1
            known = group_version(group)
            version = self._version if known is None else min(known, self._version)
            self._watch(InflightGroup(task, group, prompt, ticket, generated, version))

    def _watch(self, one: InflightGroup) -> None:
        """Register a group, and a callback for its end, so that waiting does not scan all tasks."""
        self._count += 1
        one.order = self._count
        self._under_way[one.task] = one
        self._versions[one.version] += 1
        one.task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[Group]) -> None:
        if task in self._under_way:
            self._ended.add(task)
            self._changed.set()

    def _ended_in_order(self) -> list[InflightGroup]:
        """Return the groups in flight that have ended, in the order of their dispatch."""
        return sorted((self._under_way[task] for task in self._ended), key=lambda one: one.order)

    async def _collect(self, one: InflightGroup) -> None:
        """Filter a group that has ended and add it to the ready ones; it is in flight until the filter returns."""
        group = result_of(one.task)
        if is_cut(group) and self._serving is not None:
            self._forget(one)
            self._again.append(group if all(isinstance(member, Sample) for member in group) else one.prompts)
            return
        if is_cut(group) and one.was_held:
            self._forget(one)
            self._state.remaining_batch_size -= 1  # an earlier rollout cut it off outside the gate
            self._dispatch([self._to_continue(group, one)])
            return
        has_bound = self._args.max_weight_staleness is not None
        if has_bound and self._serving is None and is_stale(self._args, group, self._next):  # it was held too long
            self._forget(one).group = group
            self._state.remaining_batch_size -= 1
            self._regenerate_or_drop(one)
            return
        if doubtful := [one for one in leaves(group) if type(one.reward) is not float or not isfinite(one.reward)]:
            refuse_bad_rewards(self._args, doubtful)
        verdict = await self._judge.verdict(group)
        self._forget(one).group = group
        outstanding = len(self._under_way) + len(self._ready) + len(self._again)
        if not self._judge.keeps(group, verdict, insufficient=outstanding < self._args.rollout_batch_size):
            self._state.remaining_batch_size -= 1
            return
        one.sampled_version, one.arrived_at = group_version(group), time.monotonic()
        if has_bound and is_too_old(self._args, one.sampled_version, self._next):
            self._regenerate_or_drop(one)
        else:
            one.version = one.version if one.sampled_version is None else one.sampled_version
            self._ready.append(one)

    def _regenerate_or_drop(self, one: InflightGroup) -> None:
        """Handle a finished group that is too old, as `--stale-samples` says."""
        fresh = self._regenerated(one.group, None if self._serving is None else one.prompts)
        if self._serving is not None:
            self._again += [] if fresh is None else [fresh]
            self._changed.set()
        elif fresh is not None:
            self._dispatch([fresh])

    def _regenerated(self, group: Group, prompts: Group | None = None) -> Group | None:
        """Return the prompts of a group that is too old, or None if `--stale-samples` or a fan-out makes it dropped."""
        self._stale_groups += 1
        self._thrown_away_tokens += sampled_tokens(group)
        if self._args.stale_samples == "regenerate":
            fresh = prompts_of(group if prompts is None else prompts)
            if fresh is not None:
                return fresh
        if self._runtime.journal is not None:
            self._runtime.journal.drop([group])
        return None

    def _waste(self) -> Metrics:
        """Return the number of stale groups and of discarded tokens since the last call."""
        groups, tokens = self._stale_groups, self._thrown_away_tokens
        self._stale_groups = self._thrown_away_tokens = 0
        return {"rollout/stale_groups": float(groups), "rollout/thrown_away_tokens": float(tokens)}

    async def _finish(
        self, rollout_id: int, taken: Iterable[InflightGroup], judge: GroupFilter, tail: float
    ) -> tuple[list[Group], Metrics]:
        """Return the groups of a batch, sorted and filtered by the user's functions, and its metrics."""
        groups = sorted((one.group for one in taken), key=group_order)
        if all(sample.status is Sample.Status.FAILED for sample in leaves(groups)):
            refuse_all_failed(list(leaves(groups)), f"rollout {rollout_id}")
        args = self._args
        if args.rollout_sample_filter_path is not None or args.rollout_all_samples_process_path is not None:
            await call_batch_plugins(self._runtime, groups, judge, self._source)
        seconds = time.monotonic() - self._since
        metrics = rollout_metrics(args, list(leaves(groups)), seconds, judge.repetitions)
        return groups, metrics | {"perf/rollout_tail_time": tail} | judge.removed()

    def _forget(self, one: InflightGroup) -> InflightGroup:
        """Remove a group from those in flight."""
        del self._under_way[one.task]
        one.task.remove_done_callback(self._note_end)  # an abandoned task would keep this batch in memory
        self._ended.discard(one.task)
        self._versions -= Counter([one.version])
        place, one.generated = one.generated, dict(one.generated)
        place.clear()  # an abandoned task would keep the samples in memory
        self._state.pendings.discard(one.task)
        if one.ticket is not None:
            self._thrown_away_tokens += one.ticket.thrown_away_tokens
            one.ticket.thrown_away_tokens = 0
        return one

    # draining

    async def _drain(self) -> tuple[list[Group], list[Group], int]:
        """Abort the groups in flight, behind the closed gate, and wait until they end or are held.

        Returns the finished groups, the others in a state that can be dispatched again, and the number of held ones.
        """
        self._state.aborted = True
        try:
            self._left_behind |= await abort_and_wait(self._runtime, self._under_way.values())
        finally:
            self._state.aborted = False
        finished: list[Group] = []
        unfinished: list[Group] = []
        held = 0
        for task, one in list(self._under_way.items()):
            if not task.done() and task not in self._left_behind:
                del self._under_way[task]
                task.remove_done_callback(self._note_end)
                for sample in unscored(one.group):
                    sample.metadata.setdefault("start_rollout_id", self._next)
                if not one.was_held:
                    task.add_done_callback(report_failure)
                one.was_held = True
                self._state.held.append(one)
                held += 1
                continue
            self._forget(one)
            if not task.done() or task.cancelled():
                unfinished.append(self._generated(one))
            elif is_cut(task.result()):
                unfinished.append(self._to_continue(task.result(), one))
            else:
                finished.append(task.result())
        return finished, unfinished, held

    def _generated(self, one: InflightGroup) -> Group:
        """Return a cancelled group for a new dispatch: complete responses keep their tokens, others start over.

        Without `--partial-rollout`, all members of a group must be sampled by the same weights: the complete responses
        are kept only if all members are complete.
        """
        known = [one.generated.get(id(member)) if isinstance(member, Sample) else member for member in one.group]
        kept: Group = one.prompts
        if self._args.partial_rollout:
            pairs = zip(known, one.prompts, strict=True)
            kept = [prompt if produced is None else produced for produced, prompt in pairs]
        elif all(produced is not None and not is_cut([produced]) for produced in known):
            kept = [produced for produced in known if produced is not None]
        self._thrown_away_tokens += max(0, sampled_tokens(one.group) - sampled_tokens(kept))
        return self._to_continue(kept, one) if self._args.partial_rollout else kept

    def _to_continue(self, group: Group, one: InflightGroup) -> Group:
        """Return an aborted group in the state in which it goes back to the buffer."""
        if not self._args.partial_rollout:
            self._thrown_away_tokens += max(0, sampled_tokens(group) - sampled_tokens(one.prompts))
            return one.prompts
        continued: Group = []
        for member, prompt in zip(group, one.prompts, strict=True):
            if not is_cut([member]):
                continued.append(member)
            elif isinstance(member, Sample):
                if member.response_length:
                    member.metadata.setdefault("start_rollout_id", self._next)
                continued.append(member)
            else:  # samples of one generate call cannot be continued individually
                self._thrown_away_tokens += max(0, sampled_tokens([member]) - sampled_tokens([prompt]))
                continued.append(prompt)
        return continued


async def take_from_continuous(
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
        dispatcher = Dispatcher(runtime, data_source, rollout_id)
        await dispatcher.start(total=runtime.args.num_rollout, version=version)
        state.continuous = dispatcher
    await state.continuous.weights_arrived(version)
    output: RolloutFnTrainOutput = await state.continuous.take(rollout_id)
    return output
