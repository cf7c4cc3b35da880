"""Multiple choice under the path that slime plugins import it from."""

from slime.rollout.rewards.simple import gpqa_reward as compute_gpqa_reward

__all__ = ["compute_gpqa_reward"]
