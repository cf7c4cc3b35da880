"""One training rollout: groups are dispatched, judged as they finish, and collected until the batch is full.

Invariant: every group the data source hands out ends exactly once: in the batch, dropped by the filter, back in the
source's buffer (finished ones too many, and those cut off when the batch was full), or held for the next rollout, which
takes such groups over before it asks for others. The batch is sorted by index.
"""

from __future__ import annotations

import time
from typing import Any

from slime.config import Config
from slime.rollout.filters import GroupJudge, call_plugins
from slime.rollout.inflight import Flight, Landed
from slime.rollout.metrics import Metrics, rollout_metrics, tail_seconds
from slime.rollout.outcomes import Group, RolloutFnTrainOutput, group_order, leaves, refuse_all_failed
from slime.rollout.runtime import RolloutRuntime, runtime_for
from slime.rollout.sample_pipeline import refuse_bad_rewards
from slime.rollout.staleness import StaleGroups, is_stale


async def generate_batch(args: Config, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """Generate and score `rollout_batch_size` groups.

    Failed samples stay in their groups, marked; `RolloutFailed` is raised when none succeeded.
    """
    runtime = runtime_for(args)
    runtime.state.reset(rollout_id)
    flight = Flight(runtime)
    flight.adopt()
    try:
        return await _collected(runtime, rollout_id, data_source, flight)
    except BaseException:
        await flight.cancel()
        raise
    finally:
        runtime.state.remaining_batch_size = 0


async def _collected(
    runtime: RolloutRuntime, rollout_id: int, data_source: Any, flight: Flight
) -> RolloutFnTrainOutput:
    args = runtime.args
    started = time.monotonic()
    judge = GroupJudge(runtime, f"rollout {rollout_id}", data_source)
    stale = StaleGroups(runtime)
    arrivals: list[float] = []
    groups, surplus = await _filled(runtime, data_source, flight, judge, stale, arrivals)
    tail = tail_seconds(arrivals, time.monotonic())
    landed = await flight.land()
    surplus += landed.finished
    if surplus or landed.unfinished:
        returned = sorted(surplus, key=group_order) + sorted(landed.unfinished, key=group_order)
        await runtime.off_loop(data_source.add_samples, "the data source", returned)
    groups.sort(key=group_order)
    samples = list(leaves(groups))
    refuse_all_failed(samples, f"rollout {rollout_id}")
    await call_plugins(runtime, groups, judge, data_source)
    samples = list(leaves(groups))
    metrics = rollout_metrics(args, samples, time.monotonic() - started, judge.repetitions)
    metrics |= {"perf/rollout_tail_time": tail} | judge.removed()
    over_samples = args.over_sampling_batch_size > args.rollout_batch_size
    if over_samples or args.partial_rollout or args.dynamic_sampling_filter_path is not None:
        metrics |= judge.metrics() | _left_over(surplus, landed)
        metrics |= stale.counted()
        metrics["rollout/thrown_away_tokens"] += flight.thrown_away_tokens
    return RolloutFnTrainOutput(groups, metrics)


async def _filled(
    runtime: RolloutRuntime,
    data_source: Any,
    flight: Flight,
    judge: GroupJudge,
    stale: StaleGroups,
    arrivals: list[float],
) -> tuple[list[Group], list[Group]]:
    """A full batch, and the groups that finished in the same moment as its last one; `arrivals` gets its groups' times.

    `state.remaining_batch_size` counts the groups dispatched and not dropped. A source that has nothing more to hand
    out ends a batch early.
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
            flight.take_off([fit for group in prompts if (fit := stale.fit(group, state.rollout_id)) is not None])
        if not len(flight):
            break
        for group in await flight.next_finished():
            if len(groups) == target:
                surplus.append(group)
                continue
            if is_stale(args, group, state.rollout_id):  # it was held for too long
                state.remaining_batch_size -= 1
                fresh = stale.fit(group, state.rollout_id)
                flight.take_off([] if fresh is None else [fresh])
                continue
            refuse_bad_rewards(runtime.args, list(leaves(group)))
            verdict = await judge.verdict(group)
            if judge.keeps(group, verdict, insufficient=state.remaining_batch_size <= target):
                groups.append(group)
                arrivals.append(time.monotonic())
            else:
                state.remaining_batch_size -= 1
    return groups, surplus


def _left_over(surplus: list[Group], landed: Landed) -> Metrics:
    return {
        "rollout/surplus_groups": float(len(surplus)),
        "rollout/returned_groups": float(len(landed.unfinished)),
        "rollout/held_groups": float(landed.held),
    }
