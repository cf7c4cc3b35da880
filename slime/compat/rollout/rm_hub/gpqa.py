"""Multiple-choice reward (GPQA), under the import path of slime plugins."""

from slime.rollout.rewards.simple import gpqa_reward as compute_gpqa_reward

__all__ = ["compute_gpqa_reward"]
