"""A rollout file that somebody copied whole and edited: own state, own generate, own loop, own abort, own evaluation."""

import asyncio
import copy
import inspect
import logging
import uuid
from contextlib import contextmanager

from tqdm import tqdm

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.async_utils import run
from slime.utils.data import Dataset
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.http_utils import get, post
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

EVAL_PROMPT_DATASET = {}


class GenerateState(metaclass=SingletonMeta):
    """What the tasks of a rollout share."""

    def __init__(self, args):
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
        engines = args.rollout_num_gpus // args.rollout_num_gpus_per_engine
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * engines)
        self.sampling_params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        if getattr(args, "sglang_enable_deterministic_inference", False):
            self.group_sampling_seeds = [args.rollout_seed + i for i in range(args.n_samples_per_prompt)]
        self.dp_counts = [0] * (args.sglang_dp_size or 1)
        self.reset()

    @contextmanager
    def dp_rank_context(self):
        rank = self.dp_counts.index(min(self.dp_counts))
        self.dp_counts[rank] += 1
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def reset(self):
        self.remaining_batch_size = 0
        self.pendings = set()
        self.aborted = False

    def submit_generate_tasks(self, samples):
        for group in samples:
            self.pendings.add(
                asyncio.create_task(
                    generate_and_rm_group(
                        self.args, group, sampling_params=self.sampling_params.copy(), evaluation=False
                    )
                )
            )
        self.remaining_batch_size += len(samples)


async def generate(args, sample, sampling_params):
    """One request; what comes back goes onto the sample, and an aborted one can be sent again."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    assert sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED), sample.status
    if not sample.tokens:
        sample.tokens = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    if len(sample.response) > 0:
        sampling_params["max_new_tokens"] -= sample.response_length
    if sampling_params["max_new_tokens"] <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    headers = None
    if args.router_policy == "consistent_hashing" and sample.session_id:
        headers = {"X-SMG-Routing-Key": sample.session_id}
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(url, payload, headers=headers)
    meta_info = output["meta_info"]
    sampled = meta_info.get("output_token_logprobs", [])
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in sampled],
        log_probs=[item[0] for item in sampled],
        meta_info=meta_info,
        text=output["text"],
    )
    return sample


async def generate_and_rm(args, sample, sampling_params, evaluation=False):
    """One sample to its reward, under the limit of samples under way."""
    if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        assert sample.response is not None
        if not args.group_rm:
            assert sample.reward is not None
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        with state.dp_rank_context():
            path = sample.generate_function_path or args.custom_generate_function_path
            if path is not None:
                function = load_function(path)
                if "evaluation" in inspect.signature(function).parameters:
                    sample = await function(args, sample, sampling_params, evaluation=evaluation)
                else:
                    sample = await function(args, sample, sampling_params)
            else:
                sample = await generate(args, sample, sampling_params)
    sample = await apply_rollout_sample_hooks(args, sample, evaluation=evaluation)
    if args.group_rm:
        return sample
    if isinstance(sample, list):
        if any(one.status == Sample.Status.ABORTED for one in sample):
            return sample
        unscored = [one for one in sample if one.reward is None]
        for one, reward in zip(unscored, await batched_async_rm(args, unscored), strict=True):
            one.reward = reward
        return sample
    if sample.status == Sample.Status.ABORTED:
        return sample
    if sample.reward is None:
        sample.reward = await async_rm(args, sample)
    return sample


async def generate_and_rm_group(args, group, sampling_params, evaluation=False):
    """All samples of one prompt."""
    state = GenerateState(args)
    if state.aborted:
        return group
    for sample in group:
        if sample.session_id is None:
            sample.session_id = str(uuid.uuid4())
    tasks = []
    for place, sample in enumerate(group):
        params = sampling_params.copy()
        if getattr(args, "sglang_enable_deterministic_inference", False):
            params["sampling_seed"] = state.group_sampling_seeds[place]
        tasks.append(asyncio.create_task(generate_and_rm(args, sample, params, evaluation=evaluation)))
    group = await asyncio.gather(*tasks)
    if not state.aborted and args.group_rm:
        for sample, reward in zip(group, await batched_async_rm(args, group), strict=True):
            sample.reward = reward
    return group


async def abort(args, rollout_id):
    """Stop what is under way; with partial rollout what there is of it comes back."""
    aborted_samples = []
    state = GenerateState(args)
    assert not state.aborted
    state.aborted = True
    response = await get(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers")
    urls = [worker["url"] for worker in response["workers"]]
    await asyncio.gather(*(abort_until_idle(url) for url in urls))
    count = 0
    while state.pendings:
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        if not args.partial_rollout:
            continue
        for task in done:
            group = task.result()
            for sample in group:
                if sample.response and "start_rollout_id" not in sample.metadata:
                    sample.metadata["start_rollout_id"] = rollout_id
            aborted_samples.append(group)
            count += len(group)
    if args.partial_rollout:
        logger.info(f"collected {count} samples that were cut off")
    return aborted_samples


async def abort_until_idle(url):
    while True:
        await post(f"{url}/abort_request", {"abort_all": True})
        loads = await get(f"{url}/v1/loads?include=core")
        if not any(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in loads["loads"]):
            return
        await asyncio.sleep(0.1)


async def generate_rollout_async(args, rollout_id, data_source):
    """Groups until the batch is full; `data_source` is a function that hands out groups."""
    assert args.rollout_global_dataset
    state = GenerateState(args)
    dynamic_filter = None
    if args.dynamic_sampling_filter_path is not None:
        dynamic_filter = load_function(args.dynamic_sampling_filter_path)
    metrics = MetricGatherer()
    target = args.rollout_batch_size
    data = []
    everything = []
    progress = tqdm(total=target * args.n_samples_per_prompt, desc="Rollout generation", disable=True)
    while len(data) < target:
        while state.remaining_batch_size < target:
            state.submit_generate_tasks(data_source(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            assert len(group) == args.n_samples_per_prompt
            everything.append(group)
            verdict = call_dynamic_filter(dynamic_filter, args, group)
            if not verdict.keep:
                metrics.on_dynamic_filter_drop(reason=verdict.reason)
                state.remaining_batch_size -= 1
                continue
            if len(data) < target:
                data.append(group)
                progress.update(args.n_samples_per_prompt)
    progress.close()
    aborted_samples = await abort(args, rollout_id)
    assert len(data) == target
    data.sort(key=lambda group: group[0][0].index if isinstance(group[0], list) else group[0].index)
    everything.sort(key=lambda group: group[0][0].index if isinstance(group[0], list) else group[0].index)
    state.reset()
    if args.rollout_sample_filter_path is not None:
        load_function(args.rollout_sample_filter_path)(args, data)
    if args.rollout_all_samples_process_path is not None:
        load_function(args.rollout_all_samples_process_path)(args, everything, data_source)
    return RolloutFnTrainOutput(samples=data, metrics=metrics.collect()), aborted_samples


async def eval_rollout(args, rollout_id):
    assert not args.group_rm
    results = {}
    for result in await asyncio.gather(
        *(eval_rollout_single_dataset(args, rollout_id, dataset_cfg) for dataset_cfg in args.eval_datasets or [])
    ):
        results.update(result)
    return RolloutFnEvalOutput(data=results), []


async def eval_rollout_single_dataset(args, rollout_id, dataset_cfg: EvalDatasetConfig):
    key = (*dataset_cfg.cache_key, args.hf_checkpoint, args.apply_chat_template)
    if key not in EVAL_PROMPT_DATASET:
        EVAL_PROMPT_DATASET[key] = Dataset(
            path=dataset_cfg.path,
            tokenizer=load_tokenizer(args.hf_checkpoint, trust_remote_code=True),
            processor=load_processor(args.hf_checkpoint, trust_remote_code=True),
            max_length=args.eval_max_prompt_len,
            prompt_key=dataset_cfg.input_key,
            label_key=dataset_cfg.label_key,
            multimodal_keys=args.multimodal_keys,
            metadata_key=dataset_cfg.metadata_key,
            tool_key=dataset_cfg.tool_key,
            apply_chat_template=args.apply_chat_template,
            apply_chat_template_kwargs=args.apply_chat_template_kwargs,
        )
    dataset = EVAL_PROMPT_DATASET[key]
    sampling_params = {
        "temperature": dataset_cfg.temperature,
        "top_p": dataset_cfg.top_p,
        "top_k": dataset_cfg.top_k,
        "max_new_tokens": dataset_cfg.max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    tasks = []
    index = 0
    for prompt in dataset.samples:
        for _ in range(dataset_cfg.n_samples_per_eval_prompt):
            sample = copy.deepcopy(prompt)
            sample.index = index
            index += 1
            sample.metadata = dataset_cfg.inject_metadata(getattr(sample, "metadata", None))
            tasks.append(
                asyncio.create_task(generate_and_rm(args, sample, sampling_params=sampling_params, evaluation=True))
            )
    data = []
    for task in asyncio.as_completed(tasks):
        data.append(await task)
    data.sort(key=lambda sample: sample.index)
    reward_key = args.eval_reward_key or args.reward_key
    return {
        dataset_cfg.name: {
            "rewards": [sample.reward if not reward_key else sample.reward[reward_key] for sample in data],
            "truncated": [sample.status == Sample.Status.TRUNCATED for sample in data],
            "samples": data,
        }
    }


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        output, _ = run(eval_rollout(args, rollout_id))
        return output
    output, aborted_samples = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    data_source.add_samples(aborted_samples)
    return output
