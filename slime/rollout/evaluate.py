"""Evaluation over several datasets, all of them in flight together.

Every prompt is sampled `n_samples_per_eval_prompt` times with the evaluation's own sampling flags. Datasets are read
once per runtime. Failed samples are reported apart (`failed`), so the aligned lists hold only what was scored.
"""

from __future__ import annotations

import copy
from typing import Any

from slime.config import Config
from slime.data.prompts import PromptDataset
from slime.data.sample import Sample
from slime.data.tokenizer import model_context_length
from slime.rollout.base_types import RolloutFnEvalOutput, leaves
from slime.rollout.failures import RolloutFailed, refuse_all_failed
from slime.rollout.group import gather_or_cancel, generate_and_rm_group
from slime.rollout.metrics import eval_metrics
from slime.rollout.runtime import RolloutRuntime, runtime_for


async def evaluate(args: Config, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate on all of ``--eval-prompt-data``."""
    runtime = runtime_for(args)
    runtime.state.reset(rollout_id)
    datasets = {name: _dataset(runtime, path) for name, path in args.eval_prompt_data}
    results = await gather_or_cancel(_evaluate_dataset(args, name, dataset) for name, dataset in datasets.items())
    data = dict(zip(datasets, results, strict=True))
    return RolloutFnEvalOutput(data, eval_metrics(args, data))


def eval_sampling_params(args: Config, base: dict[str, Any]) -> dict[str, Any]:
    """The rollout's sampling parameters with the evaluation's own values over them."""
    own = {
        "temperature": args.eval_temperature,
        "top_p": args.eval_top_p,
        "top_k": args.eval_top_k,
        "max_new_tokens": args.eval_max_response_len,
        "min_new_tokens": args.eval_min_new_tokens,
    }
    return {**base, **{name: value for name, value in own.items() if value is not None}}


async def _evaluate_dataset(args: Config, name: str, dataset: PromptDataset) -> dict[str, Any]:
    params = eval_sampling_params(args, runtime_for(args).state.sampling_params)
    n = args.n_samples_per_eval_prompt
    groups = [_group(dataset[i], i, n) for i in range(len(dataset))]
    finished = await gather_or_cancel(generate_and_rm_group(args, group, params, evaluation=True) for group in groups)
    samples = sorted(leaves(finished), key=lambda sample: -1 if sample.index is None else sample.index)
    refuse_all_failed(samples, f"evaluation on {name}")
    scored = [sample for sample in samples if sample.reward is not None]
    if not scored:
        raise RolloutFailed(f"evaluation on {name}: none of the {len(samples)} samples was scored")
    return {
        "rewards": [sample.get_reward_value(args, evaluation=True) for sample in scored],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in scored],
        "samples": scored,
        "failed": [sample for sample in samples if sample.reward is None],
    }


def _group(prototype: Sample, position: int, n: int) -> list[Sample]:
    group = [copy.deepcopy(prototype) for _ in range(n)]
    for i, sample in enumerate(group):
        sample.group_index = position
        sample.index = position * n + i
    return group


def read_eval_datasets(args: Config, tokenizer: Any) -> dict[str, PromptDataset]:
    """All of ``--eval-prompt-data`` by path; whatever is wrong with one of them is a `UserError`."""
    return {path: _read(args, path, tokenizer) for _, path in args.eval_prompt_data}


def _dataset(runtime: RolloutRuntime, path: str) -> PromptDataset:
    if path not in runtime.eval_datasets:
        runtime.eval_datasets[path] = _read(runtime.args, path, runtime.tokenizer)
    return runtime.eval_datasets[path]


def _read(args: Config, path: str, tokenizer: Any) -> PromptDataset:
    assert args.hf_checkpoint is not None, "resolve() makes sure that --hf-checkpoint is given"
    return PromptDataset(
        path,
        tokenizer=tokenizer,
        input_key=args.eval_input_key or args.input_key,
        label_key=args.eval_label_key or args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.eval_tool_key or args.tool_key,
        apply_chat_template=args.apply_chat_template,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs,
        max_prompt_len=_max_prompt_len(args),
        max_context=model_context_length(args.hf_checkpoint),
        num_workers=args.num_data_workers,
        streaming=False,
    )


def _max_prompt_len(args: Config) -> int | None:
    if args.eval_max_prompt_len is not None or args.rollout_max_context_len is None:
        return args.eval_max_prompt_len
    return args.rollout_max_context_len - 1
