"""The default rollout functions and their parts, for users' rollout files that are derived from upstream's.

`generate_rollout` is called from synchronous code; the work runs on the event loop of the runtime that belongs to
`args`. The parts can be awaited on any event loop: the engines, the limit of samples in flight and the journal are used
on the runtime's own loop.

Outside a run, such as in a unit test of a plugin, the sample functions call the functions named in `args` on the
caller's event loop: their results and exceptions go to the caller, unchecked and unrecorded. They call each other by
their names in this module, which a test may replace.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from slime.cluster.watchdog import waiting
from slime.config import Config, plugins
from slime.config.plugins.args import RUN_MARK, run_mark
from slime.config.plugins.view import as_config
from slime.data.sample import Sample
from slime.rollout import generate as requests
from slime.rollout import sample_pipeline
from slime.rollout.dispatcher import Dispatcher, take_from_continuous
from slime.rollout.evaluate import evaluate, evaluate_dataset
from slime.rollout.event_loop import gather_or_cancel
from slime.rollout.filters import MetricGatherer, call_dynamic_filter, should_drop_dynamic_filter_output
from slime.rollout.gate import as_evaluation
from slime.rollout.generate import get_model_url
from slime.rollout.inflight import ABORT_AGAIN_S, abort_requests, result_of
from slime.rollout.outcomes import (
    Group,
    Produced,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    leaves,
    mark_failed,
    prompts_of,
)
from slime.rollout.rewards.hub import async_rm, batched_async_rm
from slime.rollout.runtime import RolloutRuntime, accepts, find_runtime, runtime_for
from slime.rollout.state import GenerateState as _GenerateState

__all__ = [
    "GenerateState",
    "MetricGatherer",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "abort",
    "apply_rollout_sample_hooks",
    "async_rm",
    "batched_async_rm",
    "call_dynamic_filter",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "generate_rollout_fully_async",
    "get_model_url",
    "load_function",
    "should_drop_dynamic_filter_output",
]

_ALONE = "slime_outside_a_run"
"""Attribute of a namespace outside a run for which responses were generated before any state was requested."""


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate one training rollout, or with `evaluation` one pass over the evaluation datasets."""
    runtime = runtime_for(args)
    if evaluation:
        return runtime.run(evaluate(runtime, rollout_id), whom=f"evaluation {rollout_id}")
    return runtime.run(Dispatcher(runtime, data_source, rollout_id).fill(), whom=f"rollout {rollout_id}")


def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return one training rollout of a generation that continues until the run ends, during training and updates.

    ``--rollout-function-path`` with this function means ``--async-mode full``; the body is for wrappers around it.
    """
    if evaluation:
        return generate_rollout(args, rollout_id, data_buffer, evaluation=True)
    runtime = runtime_for(args)
    return runtime.run(take_from_continuous(runtime, rollout_id, data_buffer), whom=f"rollout {rollout_id}")


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Any
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """Generate one training rollout; return it with the groups to put back into the data source.

    `data_source` is a data source, to which groups are returned at once, or only its `get_samples` method.
    """
    runtime = runtime_for(args)
    if not callable(data_source):
        return await runtime.on_own_loop(Dispatcher(runtime, data_source, rollout_id).fill()), []
    source = _GetSamples(data_source)
    return await runtime.on_own_loop(Dispatcher(runtime, source, rollout_id).fill()), source.put_back


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Group]]:
    """Run one pass over the evaluation datasets; no groups are put back."""
    runtime = runtime_for(args)
    return await runtime.on_own_loop(evaluate(runtime, rollout_id)), []


async def eval_rollout_single_dataset(args: Any, rollout_id: int, dataset_cfg: Any) -> dict[str, dict[str, Any]]:
    """Evaluate one dataset of `args.eval_datasets`; return the result under its name."""
    runtime = runtime_for(args)
    return await runtime.on_own_loop(evaluate_dataset(runtime, rollout_id, dataset_cfg))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate or continue the response of `sample`."""
    runtime = find_runtime(args)
    if runtime is None:
        runtime = _runtime_of_its_own(args)
        setattr(args, _ALONE, True)
    return await runtime.on_own_loop(requests.generate(runtime, sample, sampling_params))


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Produced:
    """Generate one sample, run the hooks, and score it (group rewards are computed later for the whole group)."""
    runtime = _runtime_of_run(args)
    if runtime is None:
        return await _generate_and_rm_alone(args, sample, sampling_params, evaluation)

    async def generated() -> Produced:
        with as_evaluation() if evaluation else nullcontext():
            return await sample_pipeline.generate_and_rm(runtime, sample, sampling_params, evaluation)

    return await runtime.on_own_loop(generated())


async def _generate_and_rm_alone(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Produced:
    produced: Any = sample
    if sample.status not in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        path = sample.generate_function_path or getattr(args, "custom_generate_function_path", None)
        if path is None:
            produced = await generate(args, sample, sampling_params)
        else:
            function = load_function(path)
            offered = {"evaluation": evaluation} if accepts(function, "evaluation") else {}
            produced = function(args, sample, sampling_params, **offered)
            produced = await produced if inspect.isawaitable(produced) else produced
        produced = await apply_rollout_sample_hooks(args, produced, evaluation=evaluation)
    samples = list(leaves(produced))
    unscored = [one for one in samples if one.reward is None]
    is_cut = any(one.status is Sample.Status.ABORTED for one in samples)
    if not unscored or is_cut or getattr(args, "group_rm", False):
        return produced
    if produced is sample or isinstance(produced, Sample):
        produced.reward = await async_rm(args, produced)
    else:
        for one, reward in zip(unscored, await batched_async_rm(args, unscored), strict=True):
            one.reward = reward
    return produced


async def generate_and_rm_group(
    args: Any, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """Generate and score all samples of one prompt; the journal records the outcome of each when it ends."""
    runtime = _runtime_of_run(args)
    if runtime is None:
        results = iter(
            await gather_or_cancel(
                generate_and_rm(args, member, copy.deepcopy(sampling_params), evaluation=evaluation)
                for member in group
                if isinstance(member, Sample)
            )
        )
        made: Group = [next(results) if isinstance(member, Sample) else member for member in group]
        samples = list(leaves(made))
        if getattr(args, "group_rm", False) and not any(one.status is Sample.Status.ABORTED for one in samples):
            for one, reward in zip(samples, await batched_async_rm(args, samples), strict=True):
                one.reward = reward
        return made
    work = sample_pipeline.generate_and_rm_group(runtime, group, sampling_params, evaluation)
    return await runtime.on_own_loop(work)


async def apply_rollout_sample_hooks(
    args: Any, sample: Produced, *, rollout_id: int | None = None, evaluation: bool = False
) -> Produced:
    """Apply the functions of ``--rollout-sample-hook-path`` to a sample, or to each sample of a fan-out."""
    runtime = _runtime_of_run(args)
    if runtime is None:
        offered = {"rollout_id": rollout_id, "evaluation": evaluation}
        hooks = [load_function(path) for path in getattr(args, "rollout_sample_hook_path", None) or ()]
        is_one = isinstance(sample, Sample)
        hooked = []
        for one in leaves(sample):
            for hook in hooks:
                changed = hook(args, one, **{name: value for name, value in offered.items() if accepts(hook, name)})
                changed = await changed if inspect.isawaitable(changed) else changed
                one = one if changed is None else changed
            hooked.append(one)
        return hooked[0] if is_one else hooked
    run = sample_pipeline.apply_hooks(runtime, sample, rollout_id, evaluation, is_checked=False)
    return await runtime.on_own_loop(run)


async def abort(args: Any, rollout_id: int) -> list[Group]:
    """Abort the tasks in `state.pendings`; return the groups to put back into the data source.

    With ``--partial-rollout`` they keep their partial responses. Without it, finished groups are kept and other prompts
    start over. Nothing is lost if the caller puts them back.
    """
    runtime = runtime_for(args)
    state = runtime.state
    state.aborted = True
    ended: list[asyncio.Task[Group]] = []
    while state.pendings:
        await runtime.on_own_loop(abort_requests(runtime))
        with waiting(f"{len(state.pendings)} groups under way", "to end after an abort", timeout_s=None):
            done, state.pendings = await asyncio.wait(state.pendings, timeout=ABORT_AGAIN_S)
        ended += done
    return [_to_put_back(result_of(task), rollout_id, partial=runtime.args.partial_rollout) for task in ended]


def _to_put_back(group: Group, rollout_id: int, *, partial: bool) -> Group:
    if not any(sample.status is Sample.Status.ABORTED for sample in leaves(group)):
        return group
    fresh = None if partial else prompts_of(group)
    if fresh is not None:
        return fresh
    for member in group:
        for sample in leaves([member]):
            if not isinstance(member, Sample) and sample.status is Sample.Status.ABORTED:
                mark_failed([sample], "generate: it was cut off, and one of several samples cannot be continued alone")
            elif sample.response_length:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
    return group


class _GetSamples:
    """A data source with only a `get_samples` function."""

    def __init__(self, get_samples: Callable[[int], list[Group]]) -> None:
        self.get_samples = get_samples
        self.put_back: list[Group] = []

    def add_samples(self, samples: list[Group]) -> None:
        self.put_back += samples


def GenerateState(args: Any) -> _GenerateState:
    """Return the rollout state that belongs to `args`: the same object on every call.

    If no rollout is running, a namespace gets its own state, with the tokenizer of its `hf_checkpoint` and the engines
    behind its `sglang_router_ip` and `sglang_router_port`, if it names them.
    """
    state = (find_runtime(args) or _runtime_of_its_own(args)).state
    if getattr(args, _ALONE, False):
        delattr(args, _ALONE)
    return state


def _runtime_of_run(args: Any) -> RolloutRuntime | None:
    """Return the runtime of the run or driver of `args`; None if they were only used to generate outside a run."""
    return None if getattr(args, _ALONE, False) else find_runtime(args)


def _runtime_of_its_own(args: Any) -> RolloutRuntime:
    """Return the private runtime of a namespace outside a run; other namespaces do not find it."""
    if args is None or run_mark(args) is not None or isinstance(args, Config):
        return runtime_for(args)  # its run has ended
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    urls = [] if host is None or port is None else [f"http://{host}:{port}"]
    runtime = RolloutRuntime(as_config(args), urls, dispatch=sample_pipeline.generate_and_rm_group, is_of_run=False)
    setattr(args, RUN_MARK, runtime.config.overlay.mark)
    return runtime_for(args)


def load_function(path: str) -> Callable[..., Any]:
    """Load the function at ``pkg.mod.fn``, ``file.py:fn`` or ``file.py``."""
    return plugins.load_function(path, what="function path")
