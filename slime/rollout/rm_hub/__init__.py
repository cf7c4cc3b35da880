"""Rewards under the path that slime plugins import them from."""

from slime.rollout.rewards.answers import last_boxed as extract_boxed_answer
from slime.rollout.rewards.dapo import dapo_reward as compute_score_dapo
from slime.rollout.rewards.f1 import f1_score
from slime.rollout.rewards.gpqa import gpqa_reward as compute_gpqa_reward
from slime.rollout.rewards.hub import async_rm, batched_async_rm

__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
]
