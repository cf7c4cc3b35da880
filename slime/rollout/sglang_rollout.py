"""The default rollout function and its parts, under the path that flags and slime plugins name them by."""

from slime.rollout.filters import MetricGatherer, call_dynamic_filter, should_drop_dynamic_filter_output
from slime.rollout.functions import (
    GenerateState,
    abort,
    eval_rollout,
    eval_rollout_single_dataset,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    generate_rollout_async,
    load_function,
)
from slime.rollout.requests import get_model_url
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput

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
    "get_model_url",
    "load_function",
    "should_drop_dynamic_filter_output",
]
