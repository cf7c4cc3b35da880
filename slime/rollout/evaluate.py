"""Evaluation over several datasets, all of them in flight together.

Every prompt is sampled as often and in the way its dataset says (`slime.config.datasets`). Datasets are read once
per runtime. Failed samples are reported apart (`failed`), so the aligned lists hold only what was scored.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from slime.config import Config
from slime.config.datasets import EvalDataset, eval_datasets
from slime.data.chat_template import model_context_length
from slime.data.prompt_rows import BY_RM_TYPE, LabelUse, use_by_verifier
from slime.data.prompts import PromptDataset
from slime.data.sample import Reward, Sample
from slime.rollout.metrics import eval_metrics
from slime.rollout.outcomes import RolloutFailed, RolloutFnEvalOutput, leaves, refuse_all_failed
from slime.rollout.runtime import RolloutRuntime, runtime_for
from slime.rollout.sample_pipeline import gather_or_cancel, generate_and_rm_group, refuse_bad_rewards


@dataclass(frozen=True)
class EvalPrompts:
    """A dataset and its prompts."""

    dataset: EvalDataset
    prompts: PromptDataset


async def evaluate(args: Config, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate on all datasets of ``--eval-prompt-data`` and ``--eval-config``."""
    runtime = runtime_for(args)
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


async def evaluate_dataset(args: Any, rollout_id: int, dataset: EvalDataset) -> dict[str, dict[str, Any]]:
    """Evaluate on one dataset, under its name; its prompts are read once per runtime."""
    runtime = runtime_for(args)
    runtime.state.evaluation_id = rollout_id
    known = runtime.eval_datasets | runtime.single_eval_datasets
    what = known.get(dataset.name)
    if what is None or what.dataset != dataset:
        what = EvalPrompts(dataset, _read(runtime.args, dataset, runtime.tokenizer))
        runtime.single_eval_datasets[dataset.name] = what
    with runtime.eval_pulse.during(len(what.prompts) * dataset.n_samples_per_eval_prompt):
        return {dataset.name: await _evaluate_dataset(runtime, what)}


def checked_evaluation(args: Config, output: RolloutFnEvalOutput) -> RolloutFnEvalOutput:
    """What an evaluation function returned, with all metrics; samples without a reward stand apart, as failed."""
    data = {name: _scored_apart(name, result) for name, result in output.data.items()}
    metrics = dict(output.metrics or {})
    if not all(f"eval/{name}" in metrics for name in data):
        metrics = eval_metrics(args, data) | metrics
    return RolloutFnEvalOutput(data, metrics)


def _scored_apart(name: str, result: dict[str, Any]) -> dict[str, Any]:
    rewards = result["rewards"]
    if all(reward is not None for reward in rewards):
        return result
    if all(reward is None for reward in rewards):
        raise RolloutFailed(f"evaluation on {name}: none of the {len(rewards)} samples was scored")
    failed = [sample for sample, reward in zip(result.get("samples") or (), rewards, strict=False) if reward is None]
    aligned = {
        key: [value for value, reward in zip(values, rewards, strict=True) if reward is not None]
        for key, values in result.items()
        if key in ("rewards", "truncated", "samples") and len(values) == len(rewards)
    }
    return {**result, **aligned, "failed": [*result.get("failed", ()), *failed]}


def read_eval_datasets(args: Config, tokenizer: Any) -> dict[str, EvalPrompts]:
    """All datasets by name; whatever is wrong with one of them is a `UserError`."""
    return {one.name: EvalPrompts(one, _read(args, one, tokenizer)) for one in eval_datasets(args)}


async def _evaluate_dataset(runtime: RolloutRuntime, what: EvalPrompts) -> dict[str, Any]:
    args, dataset, prompts = runtime.args, what.dataset, what.prompts
    params = dataset.sampling_params(runtime.state.sampling_params)
    groups = [_group(args, dataset, prompts[i], i) for i in range(len(prompts))]
    finished = await gather_or_cancel(
        generate_and_rm_group(runtime.plugin_args, group, params, evaluation=True) for group in groups
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


def _group(args: Config, dataset: EvalDataset, prototype: Sample, position: int) -> list[Sample]:
    n = dataset.n_samples_per_eval_prompt
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
    return group


def _read(args: Config, dataset: EvalDataset, tokenizer: Any) -> PromptDataset:
    assert args.hf_checkpoint is not None, "resolve() makes sure that --hf-checkpoint is given"
    return PromptDataset(
        dataset.path,
        tokenizer=tokenizer,
        input_key=dataset.input_key,
        label_key=dataset.label_key,
        label_use=_use_of_labels(args, dataset),
        metadata_key=dataset.metadata_key,
        tool_key=dataset.tool_key,
        multimodal_keys=args.multimodal_keys,
        prompt_suffix=dataset.prompt_suffix,
        apply_chat_template=dataset.apply_chat_template,
        apply_chat_template_kwargs=dataset.apply_chat_template_kwargs,
        max_prompt_len=_max_prompt_len(args, dataset),
        max_context=model_context_length(args.hf_checkpoint),
        any_prompt=bool(dataset.custom_generate_function_path or args.custom_generate_function_path),
        num_workers=args.num_data_workers,
        streaming=False,
    )


def _use_of_labels(args: Config, dataset: EvalDataset) -> LabelUse:
    if dataset.custom_rm_path or dataset.custom_generate_function_path:
        return "any"
    if dataset.rm_type is not None:
        return use_by_verifier(dataset.rm_type)
    own = args.custom_rm_path or args.custom_generate_function_path
    return "any" if own else use_by_verifier(args.rm_type)


def _max_prompt_len(args: Config, dataset: EvalDataset) -> int | None:
    context = args.rollout_max_context_len if args.eval_max_context_len is None else args.eval_max_context_len
    return dataset.max_prompt_len if dataset.max_prompt_len is not None or context is None else context - 1


async def by_rm_type(args: Config, sample: Sample) -> Reward:
    """The reward by a dataset's `rm_type`, whatever reward function training has."""
    plain = copy.copy(sample)
    plain.custom_rm_path = None
    return await runtime_for(args).state.typed_hub.score(plain)
