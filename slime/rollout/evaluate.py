"""Evaluates the model on several datasets concurrently.

The number of samples per prompt and the sampling parameters come from the dataset (`slime.config.datasets`). Datasets
are read once per runtime. Failed samples are reported separately (`failed`), so the aligned lists have only scored
samples.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from slime.config import Config
from slime.config.datasets import EvalDataset, eval_datasets
from slime.data.chat_template import model_context_length
from slime.data.prompt_rows import BY_RM_TYPE, LabelUse, label_use_of_verifier
from slime.data.prompts import PromptDataset
from slime.data.sample import Reward, Sample
from slime.rollout.event_loop import gather_or_cancel
from slime.rollout.metrics import eval_metrics
from slime.rollout.outcomes import EvalResult, RolloutFailed, RolloutFnEvalOutput, leaves, refuse_all_failed
from slime.rollout.rewards.hub import refuse_bad_rewards
from slime.rollout.runtime import EvalPrompts, RolloutRuntime, runtime_for
from slime.rollout.sample_pipeline import generate_and_rm_group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def evaluate(runtime: RolloutRuntime, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate on all datasets of ``--eval-prompt-data`` and ``--eval-config``."""
    args = runtime.args
    runtime.state.evaluation_id = rollout_id
    if not runtime.eval_datasets:
        runtime.eval_datasets.update(read_eval_datasets(args, runtime.tokenizer))
    datasets = runtime.eval_datasets
    wanted = sum(len(one.prompts) * one.dataset.n_samples_per_eval_prompt for one in datasets.values())
    with runtime.eval_pulse.during(wanted):
        results = await gather_or_cancel(_evaluate_dataset(runtime, one) for one in datasets.values())
    data = dict(zip(runtime.eval_datasets, results, strict=True))
    return RolloutFnEvalOutput(data, eval_metrics(args, data))


async def evaluate_dataset(runtime: RolloutRuntime, rollout_id: int, dataset: EvalDataset) -> dict[str, EvalResult]:
    """Evaluate on one dataset and return the result under its name; its prompts are read once per runtime."""
    runtime.state.evaluation_id = rollout_id
    known = runtime.eval_datasets | runtime.single_eval_datasets
    what = known.get(dataset.name)
    if what is None or what.dataset != dataset:
        what = EvalPrompts(dataset, _read_prompts(runtime.args, dataset, runtime.tokenizer))
        runtime.single_eval_datasets[dataset.name] = what
    with runtime.eval_pulse.during(len(what.prompts) * dataset.n_samples_per_eval_prompt):
        return {dataset.name: await _evaluate_dataset(runtime, what)}


def complete_evaluation(args: Config, output: RolloutFnEvalOutput) -> RolloutFnEvalOutput:
    """Complete the output of an evaluation function: add missing metrics, and move unscored samples to `failed`."""
    data: dict[str, EvalResult] = {}
    for name, result in output.data.items():
        rewards = result["rewards"]
        if all(reward is not None for reward in rewards):
            data[name] = result
            continue
        if all(reward is None for reward in rewards):
            raise RolloutFailed(f"evaluation on {name}: none of the {len(rewards)} samples was scored")
        pairs = zip(result.get("samples") or (), rewards, strict=False)
        failed = [sample for sample, reward in pairs if reward is None]
        aligned = {
            key: [value for value, reward in zip(values, rewards, strict=True) if reward is not None]
            for key, values in result.items()
            if key in ("rewards", "truncated", "samples") and len(values) == len(rewards)
        }
        data[name] = {**result, **aligned, "failed": [*result.get("failed", ()), *failed]}
    metrics = dict(output.metrics or {})
    if not all(f"eval/{name}" in metrics for name in data):
        metrics = eval_metrics(args, data) | metrics
    return RolloutFnEvalOutput(data, metrics)


def read_eval_datasets(args: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, EvalPrompts]:
    """Read all datasets by name; an invalid dataset raises a `UserError`."""
    return {one.name: EvalPrompts(one, _read_prompts(args, one, tokenizer)) for one in eval_datasets(args)}


async def _evaluate_dataset(runtime: RolloutRuntime, what: EvalPrompts) -> EvalResult:
    args, dataset, prompts = runtime.args, what.dataset, what.prompts
    params = dataset.sampling_params(runtime.state.sampling_params)
    n = dataset.n_samples_per_eval_prompt
    groups: list[list[Sample]] = []
    for position in range(len(prompts)):
        prototype = prompts[position]
        group = [copy.deepcopy(prototype) for _ in range(n)]
        for i, sample in enumerate(group):
            sample.group_index = position
            sample.index = position * n + i
            sample.generate_function_path = dataset.custom_generate_function_path
            sample.custom_rm_path = dataset.custom_rm_path
            if dataset.rm_type is not None:
                sample.metadata["rm_type"] = dataset.rm_type
                sample.custom_rm_path = dataset.custom_rm_path or BY_RM_TYPE
            sample.metadata |= copy.deepcopy(dataset.metadata_overrides)
        groups.append(group)
    finished = await gather_or_cancel(
        generate_and_rm_group(runtime, group, params, evaluation=True) for group in groups
    )
    samples = sorted(leaves(finished), key=lambda sample: -1 if sample.index is None else sample.index)
    refuse_all_failed(samples, f"evaluation on {dataset.name}")
    scored = [sample for sample in samples if sample.reward is not None]
    if not scored:
        raise RolloutFailed(f"evaluation on {dataset.name}: none of the {len(samples)} samples was scored")
    refuse_bad_rewards(args, scored, evaluation=True)
    return {
        "rewards": [sample.reward_number(args, evaluation=True) for sample in scored],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in scored],
        "samples": scored,
        "failed": [sample for sample in samples if sample.reward is None],
    }


def _read_prompts(args: Config, dataset: EvalDataset, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
    assert args.hf_checkpoint is not None, "resolve() requires --hf-checkpoint"
    context = args.rollout_max_context_len if args.eval_max_context_len is None else args.eval_max_context_len
    own_limit = dataset.max_prompt_len
    label_use: LabelUse
    if dataset.custom_rm_path or dataset.custom_generate_function_path:
        label_use = "any"
    elif dataset.rm_type is not None:
        label_use = label_use_of_verifier(dataset.rm_type)
    elif args.custom_rm_path or args.custom_generate_function_path:
        label_use = "any"
    else:
        label_use = label_use_of_verifier(args.rm_type)
    return PromptDataset(
        dataset.path,
        tokenizer=tokenizer,
        input_key=dataset.input_key,
        label_key=dataset.label_key,
        label_use=label_use,
        metadata_key=dataset.metadata_key,
        tool_key=dataset.tool_key,
        multimodal_keys=args.multimodal_keys,
        prompt_suffix=dataset.prompt_suffix,
        apply_chat_template=dataset.apply_chat_template,
        apply_chat_template_kwargs=dataset.apply_chat_template_kwargs,
        max_prompt_len=own_limit if own_limit is not None or context is None else context - 1,
        max_context=model_context_length(args.hf_checkpoint),
        any_prompt=bool(dataset.custom_generate_function_path or args.custom_generate_function_path),
        num_workers=args.num_data_workers,
        streaming=False,
    )


async def by_rm_type(args: Config, sample: Sample) -> Reward:
    """Return the reward by the `rm_type` of the dataset, independent of the reward function of training."""
    plain = copy.copy(sample)
    plain.custom_rm_path = None
    return await runtime_for(args).state.typed_hub.score(plain)
