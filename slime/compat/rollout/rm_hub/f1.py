"""Word-overlap F1 reward, under the import path of slime plugins."""

from slime.rollout.rewards.simple import f1_score
from slime.rollout.rewards.simple import normalized as normalize_answer

__all__ = ["f1_score", "normalize_answer"]
