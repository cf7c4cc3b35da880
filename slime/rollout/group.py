"""One sample, and one group of samples, from prompt to reward.

Invariant: every dispatched sample comes back exactly once, as data, as ABORTED (to be resumed), or as a failure with
its cause. What a generate function, hook or reward function raises ends here; only a `UserError` (no sample of the
run could succeed) and cancellation pass.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from slime.config import Config
from slime.data.journal import JournalFailed
from slime.data.sample import Sample
from slime.engine.http.protocol import sampling_seed
from slime.errors import UserError
from slime.rollout.base_types import Group, Produced, leaves
from slime.rollout.failures import forget_response, mark_failed, start_over
from slime.rollout.gate import as_evaluation, sample_deadline
from slime.rollout.generate import generate
from slime.rollout.runtime import RolloutRuntime, accepts, runtime_for
from slime.rollout.scoring import score_one, score_together
from slime.rollout.teacher import teach
from slime.waits import acting_as

T = TypeVar("T")


async def generate_and_rm_group(
    args: Config, group: Sequence[Produced], sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """Generate and score all samples of one prompt; fan-outs that an earlier rollout finished are taken as they are.

    A group reward is asked for only when the whole group is there, not when part of it was aborted.
    """
    runtime = runtime_for(args)
    for sample in leaves(group):
        if sample.session_id is None:
            sample.session_id = str(uuid.uuid4())
    with as_evaluation() if evaluation else nullcontext():
        results: Group = await gather_or_cancel(
            _generated_member(args, member, sampling_params, evaluation) for member in group
        )
    samples = list(leaves(results))
    if args.group_rm and not any(sample.status is Sample.Status.ABORTED for sample in samples):
        with acting_as(f"group {samples[0].group_index}"):
            await score_together(runtime, samples)
        if not evaluation:
            for member, result in zip(group, results, strict=True):
                _record(runtime, member, result)
    return results


async def _generated_member(
    args: Config, member: Produced, sampling_params: dict[str, Any], evaluation: bool
) -> Produced:
    if not isinstance(member, Sample):
        return member
    params = _own_params(args, member, sampling_params, evaluation)
    runtime, before = runtime_for(args), member.response_length
    with acting_as(f"sample {member.index} of group {member.group_index}"):
        produced = await generate_and_rm(args, member, params, evaluation)
    if not any(sample.status is Sample.Status.ABORTED for sample in leaves([produced])):
        tokens = sum(sample.response_length for sample in leaves([produced]))
        (runtime.eval_pulse if evaluation else runtime.pulse).finished(tokens - before)
    if not evaluation:
        _record(runtime, member, produced)
    return produced


def _record(runtime: RolloutRuntime, dispatched: Produced, produced: Produced) -> None:
    """What became of a sample is in the journal before anybody else sees it.

    An engine's failure is not: what the sample had before it stays there, for a run that ends of it and is resumed.
    """
    if runtime.journal is None or not isinstance(dispatched, Sample):
        return
    if not any((sample.failure or "").startswith("engine: ") for sample in leaves([produced])):
        runtime.journal.produced(dispatched, produced)


async def generate_and_rm(
    args: Config, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Produced:
    """Generate one sample, run the hooks, and score it (group rewards come later, from the group)."""
    runtime = runtime_for(args)
    produced: Produced = sample
    if sample.status not in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        if sample.status is Sample.Status.FAILED:
            start_over(sample)  # a failed sample that was handed out again
        async with runtime.semaphore:
            if runtime.state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            if args.mask_offpolicy_in_partial_rollout and sample.status is Sample.Status.ABORTED:
                sample.loss_mask = [0] * sample.response_length  # sampled by earlier weights
            with (runtime.eval_pulse if evaluation else runtime.pulse).sample():
                produced = await _generated(runtime, sample, sampling_params, evaluation)
        produced = await _hooked(runtime, produced, evaluation)
    if not evaluation:
        await teach(runtime, list(leaves([produced])))
    if not args.group_rm:
        if isinstance(produced, Sample):
            await score_one(runtime, produced)
        else:
            await score_together(runtime, produced)
    return produced


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order; when one raises, the others are cancelled and awaited before the error goes on."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _generated(
    runtime: RolloutRuntime, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Produced:
    who = sample.generate_function_path or runtime.args.custom_generate_function_path or "generate"
    try:
        async with sample_deadline(runtime.args.rollout_sample_timeout, who):
            return _checked(sample, await _call_generate(runtime, sample, sampling_params, evaluation))
    except (UserError, JournalFailed):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a generate function raises is this sample's outcome
        forget_response(sample)
        mark_failed([sample], runtime.failures.record("generate", error))
        return sample


async def _call_generate(
    runtime: RolloutRuntime, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Any:
    path = sample.generate_function_path or runtime.args.custom_generate_function_path
    if path is None:
        return await generate(runtime.args, sample, sampling_params)
    custom = runtime.function(
        path, flag="--custom-generate-function-path", params=("args", "sample", "sampling_params")
    )
    extra = {"evaluation": evaluation} if accepts(custom, "evaluation") else {}
    result = custom(runtime.args, sample, sampling_params, **extra)
    return await result if inspect.isawaitable(result) else result


def _checked(sample: Sample, result: Any) -> Produced:
    """What a generate function returned, if it is what it may return; siblings of a fan-out share a rollout id."""
    if isinstance(result, Sample):
        siblings = [result]
    elif isinstance(result, list) and result and all(isinstance(item, Sample) for item in result):
        siblings = result
    else:
        raise TypeError(f"a generate function must return a Sample or a list of them, not {result!r:.200}")
    if len(siblings) > 1:
        ids = {sibling.rollout_id for sibling in siblings}
        if ids == {None}:
            for sibling in siblings:
                sibling.rollout_id = sample.index
        elif len(ids) > 1:
            raise ValueError(f"samples of one fan-out must share one rollout_id, not {sorted(map(str, ids))}")
    for sibling in siblings:
        if sibling.status is Sample.Status.FAILED:
            mark_failed([sibling], sibling.failure or "generate: the generate function gave this sample up")
    return result


async def _hooked(runtime: RolloutRuntime, produced: Produced, evaluation: bool) -> Produced:
    paths = runtime.args.rollout_sample_hook_path
    if not paths:
        return produced
    if isinstance(produced, Sample):
        return await _hook_one(runtime, produced, paths, evaluation)
    return [await _hook_one(runtime, sample, paths, evaluation) for sample in produced]


async def _hook_one(runtime: RolloutRuntime, sample: Sample, paths: list[str], evaluation: bool) -> Sample:
    if sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED):
        return sample
    rollout_id = runtime.state.evaluation_id if evaluation else runtime.state.rollout_id
    offered = {"rollout_id": rollout_id, "evaluation": evaluation}
    try:
        for path in paths:
            hook = runtime.function(path, flag="--rollout-sample-hook-path", params=("args", "sample"))
            wanted = {name: value for name, value in offered.items() if accepts(hook, name)}
            result = hook(runtime.args, sample, **wanted)
            result = await result if inspect.isawaitable(result) else result
            if result is not None and not isinstance(result, Sample):
                raise TypeError(f"a sample hook must return a Sample or None, not {type(result).__name__}")
            sample = result or sample
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a hook raises is this sample's outcome
        mark_failed([sample], runtime.failures.record("hook", error))
    return sample


def _own_params(args: Config, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> dict[str, Any]:
    """A copy for one sample, with a seed that depends only on the run's seed and the sample's index."""
    params = dict(sampling_params)
    if sample.index is not None:
        params.setdefault(
            "sampling_seed", sampling_seed(args.rollout_seed, "eval" if evaluation else "train", sample.index)
        )
    return params
