"""The default rollout function and its helpers, under the path that flags and slime plugins name them by."""

from slime.rollout.functions import GenerateState, eval_rollout, generate_rollout, generate_rollout_async
from slime.rollout.requests import generate, get_model_url
from slime.rollout.trajectory import generate_and_rm, generate_and_rm_group

__all__ = [
    "GenerateState",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]
