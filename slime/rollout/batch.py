"""One training rollout: a batch of prompts in, as many groups of finished samples out, sorted by index."""

from __future__ import annotations

import time
from typing import Any

from slime.config import Config
from slime.data.sample import Sample
from slime.rollout.base_types import Group, RolloutFnTrainOutput, leaves
from slime.rollout.failures import refuse_all_failed
from slime.rollout.group import gather_or_cancel
from slime.rollout.metrics import rollout_metrics
from slime.rollout.runtime import RolloutRuntime, runtime_for


async def generate_batch(args: Config, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """Generate and score `rollout_batch_size` groups.

    Failed samples stay in their groups, marked; `RolloutFailed` is raised when none succeeded.
    """
    runtime = runtime_for(args)
    started = time.monotonic()
    runtime.state.reset(rollout_id)
    prompts: list[list[Sample]] = data_source.get_samples(args.rollout_batch_size)
    groups = await _finished_groups(runtime, prompts)
    groups.sort(key=_index)
    samples = list(leaves(groups))
    refuse_all_failed(samples, f"rollout {rollout_id}")
    if args.rollout_sample_filter_path is not None:
        sample_filter = runtime.function(
            args.rollout_sample_filter_path, flag="--rollout-sample-filter-path", params=("args", "groups")
        )
        sample_filter(args, groups)
    return RolloutFnTrainOutput(groups, rollout_metrics(args, samples, time.monotonic() - started))


async def _finished_groups(runtime: RolloutRuntime, prompts: list[list[Sample]]) -> list[Group]:
    tasks = runtime.state.submit_generate_tasks(prompts)
    try:
        return await gather_or_cancel(tasks)
    finally:
        runtime.state.pendings.difference_update(tasks)
        runtime.state.remaining_batch_size = 0


def _index(group: Group) -> int:
    return min((sample.index for sample in leaves(group) if sample.index is not None), default=-1)
