"""A rollout function that keeps the parts of the default one and has its own loop around them."""

import asyncio

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.sglang_rollout import (
    GenerateState,
    abort,
    eval_rollout_single_dataset,
    generate_and_rm,
    generate_and_rm_group,
    get_model_url,
    load_function,
)
from slime.utils.async_utils import run


async def train(args, rollout_id, get_samples):
    state = GenerateState(args)
    assert get_model_url(args, "default", "/generate").endswith(f":{args.sglang_router_port}/generate")
    keep = load_function(args.dynamic_sampling_filter_path)
    metrics = MetricGatherer()
    data = []
    (last,) = get_samples(1)  # this one is made by hand
    state.remaining_batch_size += 1
    params = state.sampling_params.copy()
    own = asyncio.create_task(generate_and_rm_group(args, last, sampling_params=params, evaluation=False))
    state.pendings.add(own)
    while len(data) < args.rollout_batch_size:
        while state.remaining_batch_size < args.rollout_batch_size:
            state.submit_generate_tasks(get_samples(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            verdict = call_dynamic_filter(keep, args, group)
            assert isinstance(verdict, DynamicFilterOutput)
            if should_drop_dynamic_filter_output(verdict, state.remaining_batch_size, args.rollout_batch_size):
                metrics.on_dynamic_filter_drop(reason=verdict.reason)
                state.remaining_batch_size -= 1
            elif len(data) < args.rollout_batch_size:
                data.append(group)
    aborted = await abort(args, rollout_id)
    state.reset()
    return RolloutFnTrainOutput(samples=data, metrics=metrics.collect()), aborted


async def evaluate(args, rollout_id):
    state = GenerateState(args)
    (dataset_cfg,) = args.eval_datasets
    results = await eval_rollout_single_dataset(args, rollout_id, dataset_cfg)
    best = max(results[dataset_cfg.name]["samples"], key=lambda sample: sample.reward)
    again = type(best)(prompt=best.prompt, label=best.label, index=10_000)
    greedy = await generate_and_rm(args, again, {**state.sampling_params, "temperature": 0.0}, evaluation=True)
    results["greedy"] = {"rewards": [greedy.reward], "truncated": [False], "samples": [greedy]}
    return results


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        return run(evaluate(args, rollout_id))
    output, aborted = run(train(args, rollout_id, data_source.get_samples))
    data_source.add_samples(aborted)
    return output
