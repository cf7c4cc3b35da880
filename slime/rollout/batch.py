"""Generates one training rollout: dispatches groups, filters them as they finish, and collects a full batch.

Invariant: every group that the data source hands out ends exactly once: in the batch, dropped by the filter, back in
the source's buffer (surplus finished groups, and those cut off when the batch was full), or held for the next rollout,
which takes these groups over before it requests new ones. The batch is sorted by index.
"""

from __future__ import annotations

import time

from slime.config import Config
from slime.rollout.filters import GroupFilter, call_batch_plugins
from slime.rollout.inflight import InflightGroups
from slime.rollout.metrics import rollout_metrics, tail_seconds
from slime.rollout.outcomes import Group, PromptSource, RolloutFnTrainOutput, group_order, leaves, refuse_all_failed
from slime.rollout.runtime import RolloutRuntime, runtime_for
from slime.rollout.sample_pipeline import refuse_bad_rewards
from slime.rollout.staleness import StaleGroups, is_stale


async def generate_batch(args: Config, rollout_id: int, data_source: PromptSource) -> RolloutFnTrainOutput:
    """Generate and score `rollout_batch_size` groups, and return the remaining groups to the data source.

    Failed samples stay in their groups, marked as failed; `RolloutFailed` is raised if all samples failed.
    """
    runtime = runtime_for(args)
    runtime.state.reset(rollout_id)
    flight = InflightGroups(runtime)
    flight.adopt()
    try:
        args = runtime.args
        started = time.monotonic()
        judge = GroupFilter(runtime, f"rollout {rollout_id}", data_source)
        stale = StaleGroups(runtime)
        arrivals: list[float] = []
        groups, surplus = await _fill_batch(runtime, data_source, flight, judge, stale, arrivals)
        tail = tail_seconds(arrivals, time.monotonic())
        landed = await flight.land()
        surplus += landed.finished
        if surplus or landed.unfinished:
            returned = sorted(surplus, key=group_order) + sorted(landed.unfinished, key=group_order)
            await runtime.off_loop(data_source.add_samples, "the data source", returned)
        groups.sort(key=group_order)
        refuse_all_failed(list(leaves(groups)), f"rollout {rollout_id}")
        await call_batch_plugins(runtime, groups, judge, data_source)
        samples = list(leaves(groups))
        metrics = rollout_metrics(args, samples, time.monotonic() - started, judge.repetitions)
        metrics |= {"perf/rollout_tail_time": tail} | judge.removed()
        over_samples = args.over_sampling_batch_size > args.rollout_batch_size
        if over_samples or args.partial_rollout or args.dynamic_sampling_filter_path is not None:
            metrics |= judge.metrics() | {
                "rollout/surplus_groups": float(len(surplus)),
                "rollout/returned_groups": float(len(landed.unfinished)),
                "rollout/held_groups": float(landed.held),
            }
            metrics |= stale.counted()
            metrics["rollout/thrown_away_tokens"] += flight.thrown_away_tokens
        return RolloutFnTrainOutput(groups, metrics)
    except BaseException:
        await flight.cancel()
        raise
    finally:
        runtime.state.remaining_batch_size = 0


async def _fill_batch(
    runtime: RolloutRuntime,
    data_source: PromptSource,
    flight: InflightGroups,
    judge: GroupFilter,
    stale: StaleGroups,
    arrivals: list[float],
) -> tuple[list[Group], list[Group]]:
    """Return a full batch, and the groups that finished together with its last one.

    `arrivals` gets the arrival times of the groups in the batch. `state.remaining_batch_size` counts the groups that
    are dispatched and not dropped. The batch ends early if the source is exhausted.
    """
    args, state = runtime.args, runtime.state
    assert state.rollout_id is not None
    target = args.rollout_batch_size
    groups: list[Group] = []
    surplus: list[Group] = []
    while len(groups) < target:
        while state.remaining_batch_size < target:
            prompts = await runtime.off_loop(data_source.get_samples, "the data source", args.over_sampling_batch_size)
            if not prompts:
                break
            flight.dispatch_groups(
                [fit for group in prompts if (fit := stale.fit(group, state.rollout_id)) is not None]
            )
        if not len(flight):
            break
        for group in await flight.next_finished():
            if len(groups) == target:
                surplus.append(group)
                continue
            if is_stale(args, group, state.rollout_id):  # it was held too long
                state.remaining_batch_size -= 1
                fresh = stale.fit(group, state.rollout_id)
                flight.dispatch_groups([] if fresh is None else [fresh])
                continue
            refuse_bad_rewards(runtime.args, list(leaves(group)))
            verdict = await judge.verdict(group)
            if judge.keeps(group, verdict, insufficient=state.remaining_batch_size <= target):
                groups.append(group)
                arrivals.append(time.monotonic())
            else:
                state.remaining_batch_size -= 1
    return groups, surplus
